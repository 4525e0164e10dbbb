//! Which workers receive, which are parked, and which one is woken. A pure value: no thread, no lock, no clock of its
//! own.
//!
//! What it guarantees, where a worker is idle: while others execute, one is in tiny_http's queue or has been woken. The
//! exception is a short batch of reads that is about to end, whose worker receives next. What becomes ready without an
//! event (a retry that is due, memory that is free again, the expected end of such a batch) is covered by the time-out
//! of one idle worker.

use std::time::Instant;

/// Workers in tiny_http's queue, at most: one for the next request, and one for those that come while it is executed.
const RECEIVERS: usize = 2;

/// How many workers do what, except those that execute.
#[derive(Debug, Default)]
pub(super) struct Roles {
    receiving: usize,
    parked: usize,
    /// When an idle worker wakes by itself.
    wakes_at: Option<Instant>,
    stopping: bool,
}

/// What a worker does for which there is nothing to execute. It then [returns](Roles::returned).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It waits in tiny_http's queue: until a request comes, it is woken, or the time has come.
    Receive(Option<Instant>),
    /// It waits until it is woken, or the time has come.
    Park(Option<Instant>),
    /// It ends, and has the others look whether they do, too.
    End,
}

/// Which idle worker is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// A parked one.
    Parked,
    /// One in tiny_http's queue.
    Receiving,
}

impl Roles {
    /// What a worker does that has nothing to execute. `due` is when something becomes ready by itself, `ends_soon`
    /// where a batch ends so soon that what arrives waits for it, and `is_idle` where nothing is queued or in flight.
    pub fn rest(&mut self, due: Option<Instant>, ends_soon: bool, is_idle: bool) -> Role {
        if self.stopping && is_idle {
            return Role::End;
        }
        // One worker wakes for it: this one, if no other does by then.
        let at = due.filter(|due| self.wakes_at.is_none_or(|earlier| *due < earlier));
        self.wakes_at = at.or(self.wakes_at);
        match self.receiving < RECEIVERS && !ends_soon && !self.stopping {
            true => {
                self.receiving += 1;
                Role::Receive(at)
            }
            false => {
                self.parked += 1;
                Role::Park(at)
            }
        }
    }

    /// A worker has done with its role.
    pub fn returned(&mut self, role: Role) {
        let at = match role {
            Role::Receive(at) => {
                self.receiving -= 1;
                at
            }
            Role::Park(at) => {
                self.parked -= 1;
                at
            }
            Role::End => None,
        };
        if at.is_some() && self.wakes_at == at {
            self.wakes_at = None;
        }
    }

    /// Before a worker executes: whom it wakes, because more is ready, no worker receives, or none wakes for what is
    /// due.
    pub fn wake_for_the_rest(&self, is_ready: bool, ends_soon: bool, due: Option<Instant>) -> Option<Wake> {
        let watched = self.receiving > 0 || ends_soon || self.stopping;
        let timed = due.is_none() || self.wakes_at.is_some();
        (is_ready || !watched || !timed).then(|| self.wake()).flatten()
    }

    /// An idle worker, if there is one.
    pub fn wake(&self) -> Option<Wake> {
        match (self.parked, self.receiving) {
            (1.., _) => Some(Wake::Parked),
            (0, 1..) => Some(Wake::Receiving),
            (0, 0) => None,
        }
    }

    /// How many are in tiny_http's queue.
    pub fn receiving(&self) -> usize {
        self.receiving
    }

    /// From now on no worker receives, and each ends when all is done.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether it was told to.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn after(milliseconds: u64) -> Option<Instant> {
        // Of one test; it is compared only.
        static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        Some(*START + Duration::from_millis(milliseconds))
    }

    #[test]
    fn two_receive_and_the_others_are_parked() {
        let mut roles = Roles::default();
        assert_eq!(roles.wake(), None, "all execute");
        let rest = |roles: &mut Roles| roles.rest(None, false, true);
        assert_eq!((rest(&mut roles), roles.wake()), (Role::Receive(None), Some(Wake::Receiving)));
        assert_eq!(rest(&mut roles), Role::Receive(None));
        assert_eq!((rest(&mut roles), roles.wake()), (Role::Park(None), Some(Wake::Parked)));
        assert_eq!(roles.receiving(), 2);
        // A request came: its worker rests again, in the queue.
        roles.returned(Role::Receive(None));
        assert_eq!(rest(&mut roles), Role::Receive(None));
        roles.returned(Role::Park(None));
        assert_eq!(roles.wake(), Some(Wake::Receiving));
    }

    #[test]
    fn one_worker_wakes_for_what_is_due() {
        let mut roles = Roles::default();
        assert_eq!(roles.rest(after(50), false, false), Role::Receive(after(50)));
        assert_eq!(roles.rest(after(50), false, false), Role::Receive(None), "another one does");
        assert_eq!(roles.rest(after(80), false, false), Role::Park(None), "another one does before that");
        assert_eq!(roles.rest(after(20), false, false), Role::Park(after(20)));
        // The one that was to wake later has no say any more.
        roles.returned(Role::Receive(after(50)));
        assert_eq!(roles.rest(after(20), false, false), Role::Receive(None));
        roles.returned(Role::Park(after(20)));
        assert_eq!(roles.rest(after(50), false, false), Role::Park(after(50)));
    }

    #[test]
    fn whom_a_worker_wakes_before_it_executes() {
        let receivers = |count: usize, due| {
            let mut roles = Roles::default();
            (0..count).for_each(|_| assert_ne!(roles.rest(due, false, false), Role::End));
            roles
        };
        let (parked, receiving) = (Some(Wake::Parked), Some(Wake::Receiving));
        let rows = [
            // Idle workers, what is due for them, what is ready and what is due now.
            (0, None, false, None, None),
            (0, None, true, after(1), None),
            (1, None, false, None, None),
            (1, None, true, None, receiving),
            (1, None, false, after(1), receiving),
            (1, after(1), false, after(1), None),
            (3, None, false, None, None),
            (3, None, true, None, parked),
            (3, None, false, after(1), parked),
            (3, after(9), false, after(1), None),
        ];
        for (idle, at, is_ready, due, expected) in rows {
            let roles = receivers(idle, at);
            assert_eq!(
                roles.wake_for_the_rest(is_ready, false, due),
                expected,
                "{idle}, {at:?}, {is_ready}, {due:?}"
            );
        }
        let mut roles = receivers(3, None);
        roles.returned(Role::Receive(None));
        roles.returned(Role::Receive(None));
        assert_eq!(roles.wake_for_the_rest(false, false, None), parked, "no worker receives");
    }

    #[test]
    fn none_receives_while_a_short_batch_ends_soon() {
        let mut roles = Roles::default();
        assert_eq!(roles.rest(after(1), true, false), Role::Park(after(1)));
        assert_eq!(roles.rest(after(1), true, false), Role::Park(None));
        assert_eq!(roles.wake_for_the_rest(false, true, after(1)), None, "it is timed");
        roles.returned(Role::Park(after(1)));
        assert_eq!(
            roles.wake_for_the_rest(false, true, after(2)),
            Some(Wake::Parked),
            "none would wake in time"
        );
        // It did not end in time.
        assert_eq!(roles.rest(None, false, false), Role::Receive(None));
    }

    #[test]
    fn at_a_stop_all_end_once_all_is_done() {
        let mut roles = Roles::default();
        assert_eq!(roles.rest(None, false, true), Role::Receive(None));
        roles.stop();
        assert_eq!(roles.rest(after(5), false, false), Role::Park(after(5)), "a batch is in flight");
        assert_eq!(roles.rest(None, false, true), Role::End);
        roles.returned(Role::Receive(None));
        assert_eq!(roles.rest(None, false, true), Role::End);
    }

    /// Workers in any order: as many as rest are counted, and what is due has a worker that wakes for it in time,
    /// unless all execute.
    #[test]
    fn at_random() {
        let mut seed = 1_u64;
        let mut below = |count: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % count
        };
        const WORKERS: usize = 9;
        let mut roles = Roles::default();
        let mut resting: Vec<Role> = Vec::new();
        let mut due = None;
        for step in 0..100_000 {
            match below(4) {
                // Something new is due, told before a worker executes, which has the right one wake for it.
                0 if resting.len() < WORKERS => {
                    due = Some(after(below(50))).flatten();
                    if let Some(wake) = roles.wake_for_the_rest(false, false, due) {
                        let woken = resting.iter().position(|role| match wake {
                            Wake::Parked => matches!(role, Role::Park(_)),
                            Wake::Receiving => matches!(role, Role::Receive(_)),
                        });
                        roles.returned(resting.swap_remove(woken.expect("there is one")));
                        resting.push(roles.rest(due, false, false));
                    }
                }
                1 | 2 if resting.len() < WORKERS => resting.push(roles.rest(due, false, false)),
                _ if !resting.is_empty() => {
                    let at = below(resting.len() as u64) as usize;
                    roles.returned(resting.swap_remove(at));
                    // As every worker that has returned: it rests again, or executes and wakes for the rest.
                    resting.push(roles.rest(due, false, false));
                }
                _ => {}
            }
            let receiving = resting.iter().filter(|role| matches!(role, Role::Receive(_))).count();
            assert_eq!((roles.receiving(), roles.parked), (receiving, resting.len() - receiving), "{step}");
            assert!(receiving <= RECEIVERS && (receiving > 0 || resting.is_empty()), "{step}");
            let mut wakes = resting.iter().filter_map(|role| match role {
                Role::Receive(at) | Role::Park(at) => *at,
                Role::End => None,
            });
            assert!(
                roles.wakes_at.is_none_or(|at| wakes.any(|other| other == at)),
                "{step}: it is counted on"
            );
        }
    }
}
