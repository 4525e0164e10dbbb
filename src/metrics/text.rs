//! Prometheus' text format, 0.0.4: families of metrics with their help and kind, and samples with their labels.

use super::Histogram;
use std::fmt::Display;

/// The text of a scrape while it is written. A value belongs to the family that was begun last.
#[derive(Default)]
pub struct MetricsText {
    /// The text that was written so far.
    pub written: String,
    family: &'static str,
}

impl MetricsText {
    /// Begins a family of this kind: a `counter`, which only grows until the process ends, a `gauge` or a `histogram`.
    /// `help` is one line.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.written += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self.family = name;
    }

    /// Writes the value of a counter or a gauge. Labels need no escaping: they are constants.
    pub fn value(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.sample("", labels, value);
    }

    /// Writes a gauge without labels.
    pub fn gauge(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.value(&[], value);
    }

    /// Writes a counter without labels.
    pub fn counter(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.value(&[], value);
    }

    /// Writes a histogram. `ends` are the upper ends of its buckets; the last bucket has none.
    pub(super) fn histogram(&mut self, labels: &[(&str, &str)], ends: &[f64], histogram: &Histogram) {
        let mut count = 0;
        for (at, values) in histogram.buckets[..=ends.len()].iter().enumerate() {
            count += values;
            let end = ends.get(at).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            self.sample("_bucket", &[labels, &[("le", &end)]].concat(), count);
        }
        self.sample("_sum", labels, histogram.sum);
        self.sample("_count", labels, count);
    }

    fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<_> = labels.iter().map(|(name, label)| format!("{name}=\"{label}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        self.written += &format!("{}{suffix}{labels} {value}\n", self.family);
    }
}
