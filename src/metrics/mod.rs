//! What is counted while the service works, and the text that Prometheus reads (format 0.0.4).
//!
//! Owns the figures that threads count, their names and labels. Each thread counts in a [`Recorder`] of its own, so
//! that no two share a cache line; a scrape adds them up. Labels have a fixed set of values: no path and no text of a
//! client is ever one. Other modules add figures that are looked up at each scrape.

mod process;
mod text;

pub use text::{Kind, Text};

use crate::{http::Method, reason::Reason};
use process::Process;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// By their numbers, and then that of a request that was refused before its method was looked at.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "OTHER", "none"];

/// The most frequent first.
const STATUSES: [u16; 23] = [
    200, 201, 204, 404, 409, 304, 400, 401, 403, 405, 408, 412, 413, 414, 415, 417, 422, 429, 431, 500, 501,
    503, 505,
];

/// Seconds; the upper ends of the buckets of durations.
const SECONDS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The upper ends of the buckets of batches.
const SIZES: [f64; 7] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

/// Lanes that a recorder has histograms for.
const MOST_LANES: usize = 8;

/// The figures of one server.
pub struct Metrics {
    lanes: &'static [&'static str],
    /// Those of the table, and then any other path, and what was refused before its path was looked at.
    routes: Vec<&'static str>,
    recorders: Mutex<Vec<Arc<Recorder>>>,
    sources: Mutex<Vec<Source>>,
    process: Process,
}

/// Writes figures that are looked up when they are asked for. It must not block.
type Source = Box<dyn Fn(&mut Text) + Send>;

/// What one thread counts. Only that thread may write here.
#[derive(Default)]
#[repr(align(128))]
pub struct Recorder {
    /// By method and route; allocated with the first request.
    requests: Box<[OnceLock<Box<Requests>>]>,
    refusals: [Counter; Reason::ALL.len()],
    batches: [Histogram; MOST_LANES],
    /// Connections.
    pub accepted: Counter,
    /// Commands that met a lock and were retried.
    pub lock_retries: Counter,
}

#[derive(Default)]
#[repr(align(128))]
struct Requests {
    /// By status; the last one is any other.
    statuses: [Counter; STATUSES.len() + 1],
    durations: Histogram,
}

/// A number that one thread writes and others read.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Without a locked instruction: there is one writer.
    pub fn add(&self, more: u64) {
        self.0.store(self.get() + more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many values fell into each bucket, of which the one behind the last end has all beyond; and their sum in some
/// small unit. One of few ends leaves buckets unused.
#[derive(Default)]
struct Histogram {
    buckets: [Counter; SECONDS.len() + 1],
    sum: Counter,
}

impl Histogram {
    fn add(&self, value: f64, ends: &[f64], units: u64) {
        self.buckets[ends.iter().position(|end| value <= *end).unwrap_or(ends.len())].add(1);
        self.sum.add(units);
    }
}

/// Writes the histograms of several threads, added up.
fn write_histograms(text: &mut Text, labels: &[(&str, &str)], ends: &[f64], unit: f64, all: &[&Histogram]) {
    let counts = (0..=ends.len()).map(|at| all.iter().map(|one| one.buckets[at].get()).sum());
    let sum: u64 = all.iter().map(|one| one.sum.get()).sum();
    text.histogram(labels, ends, counts, sum as f64 * unit);
}

impl Recorder {
    /// A request was answered, so long after it had come; `route` is the number of its route, where it has one.
    pub fn request(&self, method: Method, route: Option<usize>, status: u16, duration: Duration) {
        let requests = self.requests(method as usize, route.unwrap_or(self.routes() - 2));
        requests.count(status);
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        requests.durations.add(duration.as_secs_f64(), &SECONDS, nanoseconds);
    }

    /// A request was refused before its route was looked at.
    pub fn refusal(&self, reason: Option<Reason>, status: u16) {
        self.requests(METHODS.len() - 1, self.routes() - 1).count(status);
        if let Some(reason) = reason {
            self.refused(reason);
        }
    }

    /// A request was refused for this reason; it is counted as answered elsewhere.
    pub fn refused(&self, reason: Reason) {
        self.refusals[reason as usize].add(1);
    }

    /// A batch was executed.
    pub fn batch(&self, lane: usize, commands: usize) {
        self.batches[lane].add(commands as f64, &SIZES, commands as u64);
    }

    fn routes(&self) -> usize {
        self.requests.len() / METHODS.len()
    }

    fn requests(&self, method: usize, route: usize) -> &Requests {
        self.requests[method * self.routes() + route].get_or_init(Box::default)
    }
}

impl Requests {
    fn count(&self, status: u16) {
        let at = STATUSES.iter().position(|known| *known == status);
        self.statuses[at.unwrap_or(STATUSES.len())].add(1);
    }
}

impl Metrics {
    /// Nothing counted. `lanes` and `routes`: their labels.
    pub fn new(lanes: &'static [&'static str], routes: impl Iterator<Item = &'static str>) -> Metrics {
        assert!(lanes.len() <= MOST_LANES, "there is room for {MOST_LANES} lanes");
        let (recorders, sources) = (Mutex::default(), Mutex::default());
        let routes = routes.chain(["other", "none"]).collect();
        Metrics { lanes, routes, recorders, sources, process: Process::new() }
    }

    /// For one more thread. What it has counted stays when the thread ends.
    pub fn recorder(&self) -> Arc<Recorder> {
        let requests = (0..METHODS.len() * self.routes.len()).map(|_| OnceLock::new()).collect();
        let recorder = Arc::new(Recorder { requests, ..Recorder::default() });
        locked(&self.recorders).push(recorder.clone());
        recorder
    }

    /// Has these figures written at each scrape.
    pub fn add_source(&self, source: impl Fn(&mut Text) + Send + 'static) {
        locked(&self.sources).push(Box::new(source));
    }

    /// How often a command met a lock and was retried.
    pub fn lock_retries(&self) -> u64 {
        locked(&self.recorders).iter().map(|recorder| recorder.lock_retries.get()).sum()
    }

    /// Writes all that is counted here, and what the sources have.
    pub fn write(&self, text: &mut Text) {
        text.family("userd_build_info", Kind::Gauge, "The version of the service.");
        text.value(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        let recorders = locked(&self.recorders).clone();
        self.write_requests(text, &recorders);
        text.family(
            "userd_http_refusals_total",
            Kind::Counter,
            "Requests refused before they were queued, by reason.",
        );
        for (reason, label, _) in Reason::ALL {
            let count: u64 = recorders.iter().map(|recorder| recorder.refusals[reason as usize].get()).sum();
            text.value(&[("reason", label)], count);
        }
        let accepted: u64 = recorders.iter().map(|recorder| recorder.accepted.get()).sum();
        text.counter("userd_http_connections_accepted_total", "Connections of clients accepted.", accepted);
        text.family("userd_batch_size", Kind::Histogram, "Commands executed as one batch, by lane.");
        for (at, lane) in self.lanes.iter().enumerate() {
            let all: Vec<_> = recorders.iter().map(|recorder| &recorder.batches[at]).collect();
            write_histograms(text, &[("lane", lane)], &SIZES, 1.0, &all);
        }
        for source in locked(&self.sources).iter() {
            source(text);
        }
        self.process.write(text);
    }

    fn write_requests(&self, text: &mut Text, recorders: &[Arc<Recorder>]) {
        let label = |at: usize| (METHODS[at / self.routes.len()], self.routes[at % self.routes.len()]);
        let series = |at: usize| -> Vec<&Requests> {
            recorders.iter().filter_map(|recorder| Some(&**recorder.requests[at].get()?)).collect()
        };
        let all: Vec<_> = (0..METHODS.len() * self.routes.len())
            .map(|at| (label(at), series(at)))
            .filter(|(_, series)| !series.is_empty())
            .collect();
        text.family(
            "userd_http_requests_total",
            Kind::Counter,
            "Requests answered, by method, route and status.",
        );
        for ((method, route), series) in &all {
            for at in 0..=STATUSES.len() {
                let count: u64 = series.iter().map(|one| one.statuses[at].get()).sum();
                if count > 0 {
                    let status = STATUSES.get(at).map_or_else(|| "other".to_owned(), u16::to_string);
                    text.value(&[("method", method), ("route", route), ("status", &status)], count);
                }
            }
        }
        text.family(
            "userd_http_request_duration_seconds",
            Kind::Histogram,
            "Time from a whole request to its answer, by method and route.",
        );
        for ((method, route), series) in all.iter().filter(|((_, route), _)| *route != "none") {
            let all: Vec<_> = series.iter().map(|one| &one.durations).collect();
            write_histograms(text, &[("method", method), ("route", route)], &SECONDS, 1e-9, &all);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics) -> String {
        let mut text = Text::default();
        metrics.write(&mut text);
        text.end()
    }

    #[test]
    fn threads_are_added_up() {
        let metrics = Metrics::new(&["find", "create"], ["/users/{id}"].into_iter());
        let [one, other] = [metrics.recorder(), metrics.recorder()];
        let time = Duration::from_millis(2);
        one.request(Method::Get, Some(0), 200, time);
        one.request(Method::Get, Some(0), 200, Duration::from_secs(60));
        other.request(Method::Get, Some(0), 200, time);
        other.request(Method::Get, Some(0), 999, time);
        other.request(Method::Other, None, 501, time);
        one.refusal(Some(Reason::BadRequest), 400);
        one.batch(0, 64);
        other.batch(0, 1);
        other.batch(1, 65);
        drop(other);
        let text = text(&metrics);
        for line in [
            r#"userd_http_requests_total{method="GET",route="/users/{id}",status="200"} 3"#,
            r#"userd_http_requests_total{method="GET",route="/users/{id}",status="other"} 1"#,
            r#"userd_http_requests_total{method="OTHER",route="other",status="501"} 1"#,
            r#"userd_http_requests_total{method="none",route="none",status="400"} 1"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="0.001"} 0"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="0.0025"} 3"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="10"} 3"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="+Inf"} 4"#,
            r#"userd_http_request_duration_seconds_count{method="GET",route="/users/{id}"} 4"#,
            r#"userd_http_refusals_total{reason="bad_request"} 1"#,
            r#"userd_http_refusals_total{reason="content_too_large"} 0"#,
            r#"userd_batch_size_bucket{lane="find",le="1"} 1"#,
            r#"userd_batch_size_bucket{lane="find",le="32"} 1"#,
            r#"userd_batch_size_bucket{lane="find",le="64"} 2"#,
            r#"userd_batch_size_sum{lane="find"} 65"#,
            r#"userd_batch_size_count{lane="find"} 2"#,
            r#"userd_batch_size_bucket{lane="create",le="64"} 0"#,
            r#"userd_batch_size_bucket{lane="create",le="+Inf"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
        }
        let sum = text.lines().find_map(|line| {
            line.strip_prefix(
                "userd_http_request_duration_seconds_sum{method=\"GET\",route=\"/users/{id}\"} ",
            )
        });
        assert!((sum.unwrap().parse::<f64>().unwrap() - 60.006).abs() < 1e-6, "{sum:?}");
        assert!(!text.contains("duration_seconds_count{method=\"none\""), "{text}");
    }

    #[test]
    fn labels_follow_the_numbers() {
        let methods = [
            Method::Get,
            Method::Head,
            Method::Post,
            Method::Put,
            Method::Patch,
            Method::Delete,
            Method::Options,
            Method::Other,
        ];
        for method in methods {
            assert_eq!(METHODS[method as usize], method.to_string());
        }
        for (at, (reason, label, _)) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at, "{label}");
        }
    }
}
