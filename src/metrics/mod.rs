//! What is counted while the service works, and the text that Prometheus reads (format 0.0.4).
//!
//! Owns the figures that threads count, their names and labels. Each thread counts in a [`Recorder`] of its own, so that
//! no two share a cache line; a scrape adds them up. Labels have a fixed set of values: no path and no text of a client is
//! ever one. Other modules add figures that are looked up at each scrape.

mod process;
mod text;

pub use text::{Kind, Text};

use crate::{http::Method, reason::Reason};
use process::Process;
use std::{
    array,
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
#[repr(align(128))]
pub struct Recorder {
    /// By method and route; allocated with the first request.
    requests: Box<[OnceLock<Box<Requests>>]>,
    refusals: [Counter; Reason::ALL.len()],
    batches: [Histogram<{ SIZES.len() }>; MOST_LANES],
    accepted: Counter,
    lock_retries: Counter,
}

#[repr(align(128))]
struct Requests {
    /// By status; the last one is any other.
    statuses: [Counter; STATUSES.len() + 1],
    durations: Histogram<{ SECONDS.len() }>,
}

/// A number that one thread writes and others read.
#[derive(Default)]
struct Counter(AtomicU64);

impl Counter {
    /// Without a locked instruction: there is one writer.
    fn add(&self, more: u64) {
        self.0.store(self.get() + more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many values fell into each bucket, and beyond the last one; and their sum in some small unit.
struct Histogram<const N: usize> {
    buckets: [Counter; N],
    beyond: Counter,
    sum: Counter,
}

impl<const N: usize> Histogram<N> {
    fn new() -> Histogram<N> {
        Histogram {
            buckets: array::from_fn(|_| Counter::default()),
            beyond: Counter::default(),
            sum: Counter::default(),
        }
    }

    fn add(&self, value: f64, ends: &[f64; N], units: u64) {
        let bucket = ends.iter().position(|end| value <= *end);
        bucket.map_or(&self.beyond, |at| &self.buckets[at]).add(1);
        self.sum.add(units);
    }
}

/// Histograms of several threads, added up.
struct Sum<const N: usize> {
    buckets: [u64; N],
    beyond: u64,
    sum: u64,
}

impl<const N: usize> Sum<N> {
    fn of<'a>(all: impl Iterator<Item = &'a Histogram<N>>) -> Sum<N> {
        let mut total = Sum { buckets: [0; N], beyond: 0, sum: 0 };
        for one in all {
            for (total, bucket) in total.buckets.iter_mut().zip(&one.buckets) {
                *total += bucket.get();
            }
            total.beyond += one.beyond.get();
            total.sum += one.sum.get();
        }
        total
    }

    fn write(&self, text: &mut Text, labels: &[(&str, &str)], ends: &[f64; N], unit: f64) {
        text.histogram(labels, ends.iter().copied().zip(self.buckets), self.beyond, self.sum as f64 * unit);
    }
}

impl Recorder {
    fn new(routes: usize) -> Recorder {
        Recorder {
            requests: (0..METHODS.len() * routes).map(|_| OnceLock::new()).collect(),
            refusals: array::from_fn(|_| Counter::default()),
            batches: array::from_fn(|_| Histogram::new()),
            accepted: Counter::default(),
            lock_retries: Counter::default(),
        }
    }

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

    /// A connection was accepted.
    pub fn accepted(&self) {
        self.accepted.add(1);
    }

    /// A command met a lock, and is retried.
    pub fn lock_retry(&self) {
        self.lock_retries.add(1);
    }

    fn routes(&self) -> usize {
        self.requests.len() / METHODS.len()
    }

    fn requests(&self, method: usize, route: usize) -> &Requests {
        self.requests[method * self.routes() + route].get_or_init(|| {
            Box::new(Requests {
                statuses: array::from_fn(|_| Counter::default()),
                durations: Histogram::new(),
            })
        })
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
        let recorder = Arc::new(Recorder::new(self.routes.len()));
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
        text.family(
            "userd_http_connections_accepted_total",
            Kind::Counter,
            "Connections of clients accepted.",
        );
        text.value(&[], recorders.iter().map(|recorder| recorder.accepted.get()).sum::<u64>());
        text.family("userd_batch_size", Kind::Histogram, "Commands executed as one batch, by lane.");
        for (at, lane) in self.lanes.iter().enumerate() {
            let sum = Sum::of(recorders.iter().map(|recorder| &recorder.batches[at]));
            sum.write(text, &[("lane", lane)], &SIZES, 1.0);
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
            let sum = Sum::of(series.iter().map(|one| &one.durations));
            sum.write(text, &[("method", method), ("route", route)], &SECONDS, 1e-9);
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
