//! The metrics of the service, and the text that Prometheus reads (format 0.0.4).
//!
//! Owns the metrics, their names and labels. Each label has a fixed set of values: none is a path or another text that
//! a client sent. Other modules add metrics whose values are read at each scrape.

mod process;
mod text;

pub use text::MetricsText;

use crate::{error::BusyReason, http::Method};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::env::consts;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use strum::VariantNames;

/// The upper ends, in seconds, of the buckets of the histogram of durations.
const DURATION_BUCKETS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The upper ends, in commands per batch, of the buckets of the histogram of batch sizes.
const BATCH_SIZE_BUCKETS: [f64; 7] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

/// The label `reason` of a request that is refused before all of it has arrived, for each status of the answer.
const REFUSAL_LABELS: [(u16, &str); 8] = [
    (400, "bad_request"),
    (408, "request_timeout"),
    (413, "content_too_large"),
    (414, "uri_too_long"),
    (417, "expectation_failed"),
    (431, "head_too_large"),
    (501, "not_implemented"),
    (505, "version_not_supported"),
];

/// Returns the labels of the metric `userd_build_info`; `userd --version` prints them, too. The commit is empty
/// unless the build set `USERD_COMMIT`, as `packaging/build` does.
pub fn build_info_labels() -> [(&'static str, String); 3] {
    let commit = option_env!("USERD_COMMIT").unwrap_or_default();
    let machine = format!("{}-{}", consts::ARCH, consts::OS);
    [("version", env!("CARGO_PKG_VERSION").into()), ("commit", commit.into()), ("machine", machine)]
}

/// The metrics of one server.
pub struct Metrics {
    /// The number of answered requests, by method, route and status.
    request_counts: Mutex<BTreeMap<(&'static str, &'static str, u16), u64>>,
    /// The durations of requests that have a route, by method and route.
    request_durations: Mutex<BTreeMap<(&'static str, &'static str), Histogram>>,
    /// The number of refused requests, by the label `reason`.
    refusal_counts: Mutex<BTreeMap<&'static str, u64>>,
    /// The sizes of the batches of each lane (queue of commands), with the label of the lane.
    batch_sizes: Vec<(&'static str, Mutex<Histogram>)>,
    /// The number of clients' connections that were accepted since the start.
    pub accepted_connections: AtomicU64,
    /// The number of times that a command was retried, because a lock or another command had blocked it.
    pub lock_retries: AtomicU64,
    /// The function that writes the metrics of other modules at each scrape.
    pub write_other_metrics: OnceLock<MetricsWriter>,
}

/// A function that writes metrics. It must not block, because a worker that receives requests calls the function.
pub type MetricsWriter = Box<dyn Fn(&mut MetricsText) + Send + Sync>;

/// The number of values in each bucket, and the sum of all values. The last bucket counts the values above the upper
/// end of the bucket before it. A histogram with fewer buckets than [`DURATION_BUCKETS`] leaves the others at 0.
#[derive(Default)]
struct Histogram {
    bucket_counts: [u64; DURATION_BUCKETS.len() + 1],
    sum: f64,
}

impl Histogram {
    fn add(&mut self, value: f64, bounds: &[f64]) {
        self.bucket_counts[bounds.iter().position(|end| value <= *end).unwrap_or(bounds.len())] += 1;
        self.sum += value;
    }
}

impl Metrics {
    /// Returns metrics that are all zero. `lane_labels` are the labels of the lanes (the queues of commands).
    pub fn new(lane_labels: &'static [&'static str]) -> Metrics {
        let labels = REFUSAL_LABELS.iter().map(|(_, label)| label).chain(BusyReason::VARIANTS);
        Metrics {
            request_counts: Mutex::default(),
            request_durations: Mutex::default(),
            refusal_counts: Mutex::new(labels.map(|label| (*label, 0)).collect()),
            batch_sizes: lane_labels.iter().map(|lane| (*lane, Mutex::default())).collect(),
            accepted_connections: AtomicU64::default(),
            lock_retries: AtomicU64::default(),
            write_other_metrics: OnceLock::new(),
        }
    }

    /// Counts an answered request of a route. `duration` is the time from the request's arrival to its answer.
    pub fn count_request(&self, method: Method, route: &'static str, status: u16, duration: Duration) {
        *self.request_counts.lock().entry((method.name(), route, status)).or_default() += 1;
        let mut durations = self.request_durations.lock();
        durations.entry((method.name(), route)).or_default().add(duration.as_secs_f64(), &DURATION_BUCKETS);
    }

    /// Counts a request that the frontend refuses. The frontend does not know the request's route.
    pub fn count_refusal(&self, status: u16) {
        *self.request_counts.lock().entry(("none", "none", status)).or_default() += 1;
        if let Some((_, label)) = REFUSAL_LABELS.iter().find(|(refused, _)| *refused == status) {
            *self.refusal_counts.lock().entry(label).or_default() += 1;
        }
    }

    /// Counts the reason of an answer with status 503. Another call counts the answer itself, as every answer.
    pub fn count_busy_reason(&self, reason: BusyReason) {
        *self.refusal_counts.lock().entry(reason.into()).or_default() += 1;
    }

    /// Counts an executed batch of a lane. `batch_size` is the number of commands in the batch.
    pub fn count_batch(&self, lane_index: usize, batch_size: usize) {
        self.batch_sizes[lane_index].1.lock().add(batch_size as f64, &BATCH_SIZE_BUCKETS);
    }

    /// Writes all metrics of the service and of its process.
    pub fn write(&self, text: &mut MetricsText) {
        let help = "The version of the service, its commit and the machine.";
        text.add_family("userd_build_info", "gauge", help);
        text.add_value(&build_info_labels().each_ref().map(|(label, value)| (*label, &**value)), 1);
        text.add_family("userd_http_requests_total", "counter", "Answers, by method, route and status.");
        for ((method, route, status), count) in self.request_counts.lock().iter() {
            let labels = [("method", *method), ("route", route), ("status", &status.to_string())];
            text.add_value(&labels, count);
        }
        let help = "Time from a whole request to its answer, by method and route.";
        text.add_family("userd_http_request_duration_seconds", "histogram", help);
        for ((method, route), durations) in self.request_durations.lock().iter() {
            text.add_histogram(&[("method", method), ("route", route)], &DURATION_BUCKETS, durations);
        }
        text.add_family("userd_http_refusals_total", "counter", "Requests refused unqueued, by reason.");
        for (label, count) in self.refusal_counts.lock().iter() {
            text.add_value(&[("reason", label)], count);
        }
        let (help, count) = ("Connections of clients accepted.", self.accepted_connections.load(Relaxed));
        text.add_counter("userd_http_connections_accepted_total", help, count);
        text.add_family("userd_batch_size", "histogram", "Commands executed as one batch, by lane.");
        for (lane, sizes) in &self.batch_sizes {
            text.add_histogram(&[("lane", lane)], &BATCH_SIZE_BUCKETS, &sizes.lock());
        }
        self.write_other_metrics.get().inspect(|source| source(text));
        process::write_metrics(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics) -> String {
        let mut text = MetricsText::default();
        metrics.write(&mut text);
        text.text
    }

    #[test]
    fn what_was_counted_is_written() {
        let metrics = Metrics::new(&["find", "create"]);
        let time = Duration::from_millis(2);
        metrics.count_request(Method::Get, "/users/{id}", 200, time);
        metrics.count_request(Method::Get, "/users/{id}", 200, Duration::from_secs(60));
        metrics.count_request(Method::Get, "/users/{id}", 200, time);
        metrics.count_request(Method::Get, "/users/{id}", 999, time);
        metrics.count_request(Method::Other, "other", 501, time);
        metrics.count_refusal(400);
        metrics.count_busy_reason(BusyReason::NoMemory);
        metrics.count_batch(0, 64);
        metrics.count_batch(0, 1);
        metrics.count_batch(1, 65);
        let text = text(&metrics);
        for line in [
            r#"userd_http_requests_total{method="GET",route="/users/{id}",status="200"} 3"#,
            r#"userd_http_requests_total{method="GET",route="/users/{id}",status="999"} 1"#,
            r#"userd_http_requests_total{method="OTHER",route="other",status="501"} 1"#,
            r#"userd_http_requests_total{method="none",route="none",status="400"} 1"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="0.001"} 0"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="0.0025"} 3"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="10"} 3"#,
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="+Inf"} 4"#,
            r#"userd_http_request_duration_seconds_count{method="GET",route="/users/{id}"} 4"#,
            r#"userd_http_refusals_total{reason="no_memory"} 1"#,
            r#"userd_http_refusals_total{reason="bad_request"} 1"#,
            r#"userd_http_refusals_total{reason="content_too_large"} 0"#,
            r#"userd_http_refusals_total{reason="stopped"} 0"#,
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
}
