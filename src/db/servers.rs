//! The servers that a connection string names: which of them is connected to.
//!
//! With `target_session_attrs=read-write` only the primary will do. Asking other servers takes time or misleads: an old
//! primary that was suspended during a failover takes sessions again when it goes on, until it is told of its
//! successor. So the server of the last connection is tried first, and one that did not answer lately last, and
//! briefly. Knows no statements, and not what its sessions are for.

use super::{
    target::Target,
    tls::Connector,
    watchdog::{CONNECT_TIMEOUT, ConnectError, Connection, Watchdog},
};
use parking_lot::Mutex;
use postgres::{Config, config::TargetSessionAttrs};
use std::{
    mem,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// How long a server that did not answer is waited for at the least; and at the most how many times as long as the
/// last connection took, for a server that is far away needs more.
const SHORT_TIMEOUT: Duration = Duration::from_millis(250);
const TIMES_AS_LONG: u32 = 4;

/// For how long a server that did not answer is given little time only.
const SILENT_FOR: Duration = Duration::from_secs(30);

/// Servers, and how they are connected to.
pub struct Servers {
    each: Vec<Config>,
    /// Whether the connection string asks for one that takes changes.
    pub wants_primary: bool,
    tls: Connector,
    watchdog: Watchdog,
    known: Mutex<Known>,
    /// Connections of an earlier epoch are not to be used any more.
    epoch: AtomicU64,
}

/// What earlier connections have shown.
#[derive(Default)]
struct Known {
    /// The server that was connected to last.
    last: Option<usize>,
    /// Whether it has ended the latest connection just after it was made.
    has_ended: bool,
    /// How long the last connection took.
    took: Duration,
    /// When each server did not answer although it was given its full time.
    silent: Vec<Option<Instant>>,
}

impl Servers {
    /// The servers of a target. Connects to none.
    pub fn new(target: &Target, tls: Connector, watchdog: Watchdog) -> Servers {
        let wants_primary = target.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite;
        // Where any will do, they are asked in the order that is given, or in any, as `load_balance_hosts` says: the
        // client's own affair.
        let at_once = if wants_primary { 1 } else { target.hosts.len() };
        let each: Vec<Config> = target.hosts.chunks(at_once).map(|hosts| target.config_for(hosts)).collect();
        let known = Mutex::new(Known { silent: vec![None; each.len()], ..Known::default() });
        Servers { each, wants_primary, tls, watchdog, known, epoch: AtomicU64::new(0) }
    }

    /// Connections of earlier epochs are not to be used any more: a server has ended one of them or does not answer, or
    /// another server has taken its place.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Ends an epoch, if it has not ended yet.
    pub fn end_epoch(&self, epoch: u64) {
        self.epoch.fetch_max(epoch + 1, Ordering::Relaxed);
    }

    /// A connection on which `set_up` was run, and its epoch. The error is that of the server that was asked last.
    ///
    /// Blocks for as long as [`Watchdog::connect`] with each server, and for a quarter of a second (four times as long
    /// as the last connection took) where a server was silent within the last 30 s and others were not.
    pub fn connect(&self, set_up: &str) -> Result<(Connection, u64), ConnectError> {
        // Read first: where an epoch ends while this connects, the new connection is suspect too.
        let mut epoch = self.epoch();
        let mut refused = None;
        let order = self.known.lock().order();
        for at in order {
            let start = Instant::now();
            let mut config = self.each[at].clone();
            let limit = config.get_connect_timeout().copied().unwrap_or(CONNECT_TIMEOUT);
            let short = self.known.lock().short_timeout(at);
            let limit = short.map_or(limit, |short| short.min(limit));
            match self.watchdog.connect(config.connect_timeout(limit), &self.tls, set_up) {
                Ok(connection) => {
                    let mut known = self.known.lock();
                    known.took = start.elapsed();
                    known.has_ended = false;
                    known.silent[at] = None;
                    if known.last.replace(at) != Some(at) {
                        epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
                    }
                    return Ok((connection, epoch));
                }
                Err(error) => {
                    if self.known.lock().is_kept(at, &error) {
                        return Err(error);
                    }
                    let was_silent = matches!(error, ConnectError::Silent) || start.elapsed() >= limit;
                    let silent = &mut self.known.lock().silent[at];
                    match (was_silent, short) {
                        (false, _) => *silent = None,
                        (true, None) => *silent = Some(Instant::now()),
                        (true, Some(_)) => {}
                    }
                    refused = Some(error);
                }
            }
        }
        Err(refused.expect("a target has a host"))
    }
}

impl Known {
    /// The last one first, the silent ones at the end, otherwise as they were given.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.silent.len()).collect();
        order.sort_by_key(|at| (self.silent[*at].is_some(), Some(*at) != self.last, *at));
        order
    }

    /// Whether the server is the last one and still to be used, so that none of the others is, whatever it says: it has
    /// no session left, or it ended one just after the connection, once.
    fn is_kept(&mut self, at: usize, error: &ConnectError) -> bool {
        if Some(at) != self.last {
            return false;
        }
        let has_ended = mem::replace(&mut self.has_ended, error.is_ended());
        error.is_full() || (error.is_ended() && !has_ended)
    }

    /// How long a server is waited for that did not answer lately; `None` for one that may take its time.
    fn short_timeout(&self, at: usize) -> Option<Duration> {
        let is_silent = self.silent[at].is_some_and(|since| since.elapsed() < SILENT_FOR);
        let are_all_silent = self.silent.iter().all(Option::is_some);
        (is_silent && !are_all_silent).then_some(SHORT_TIMEOUT.max(self.took * TIMES_AS_LONG))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::target::Host;

    #[test]
    fn the_last_one_is_asked_first_and_silent_ones_are_given_little_time() {
        let mut known = Known { silent: vec![None; 3], ..Known::default() };
        assert_eq!(known.order(), [0, 1, 2]);
        known.last = Some(2);
        assert_eq!(known.order(), [2, 0, 1]);
        assert_eq!(known.short_timeout(2), None);

        known.silent[2] = Some(Instant::now());
        assert_eq!(known.order(), [0, 1, 2]);
        assert_eq!((known.short_timeout(0), known.short_timeout(2)), (None, Some(SHORT_TIMEOUT)));
        known.took = Duration::from_secs(1);
        assert_eq!(known.short_timeout(2), Some(Duration::from_secs(4)));
        known.silent = vec![Some(Instant::now()); 3];
        assert_eq!(known.short_timeout(2), None, "none is better");
    }

    #[test]
    fn the_last_one_is_kept_where_another_might_answer() {
        let mut known = Known { silent: vec![None; 2], ..Known::default() };
        assert!(!known.is_kept(0, &ConnectError::Silent));
        known.last = Some(0);
        assert!(!known.is_kept(0, &ConnectError::Silent), "it does not answer");
    }

    /// What it does with one of several servers must not differ from what the client does with all of them.
    #[test]
    fn a_single_server_has_all_of_the_settings() {
        let parse = |text: &str| Target::parse(text, None).unwrap();
        // Debug hides the password.
        let shown = |target: &Target, hosts: &[Host]| {
            let config = target.config_for(hosts);
            format!("{config:?} {:?}", config.get_password())
        };
        let rest = "user=u password=p dbname=d options='-c x=y' application_name=a connect_timeout=7 \
                    tcp_user_timeout=9000 keepalives_idle=3 keepalives_interval=4 keepalives_count=5 \
                    target_session_attrs=read-write channel_binding=disable sslmode=disable";
        let all = parse(&format!("host=a,b port=1,2 hostaddr=127.0.0.1,127.0.0.2 {rest}"));
        for (at, one) in
            ["host=a port=1 hostaddr=127.0.0.1", "host=b port=2 hostaddr=127.0.0.2"].iter().enumerate()
        {
            let one = parse(&format!("{one} {rest}"));
            assert_eq!(shown(&all, &all.hosts[at..=at]), shown(&one, &one.hosts));
        }
        let sockets = parse(&format!("host=/run/a,/run/b {rest}"));
        let one = parse(&format!("host=/run/b {rest}"));
        assert_eq!(shown(&sockets, &sockets.hosts[1..]), shown(&one, &one.hosts));
    }
}
