//! Prometheus' text format, 0.0.4: families of metrics with their help and kind, and samples with their labels.

use super::Histogram;
use std::fmt::Display;

/// The answer to a scrape while it is written. Each value belongs to the family that was added last.
#[derive(Default)]
pub struct MetricsText {
    /// The text so far, which is complete once all metrics are added.
    pub text: String,
    /// The name of the family that was added last.
    current_family: &'static str,
}

impl MetricsText {
    /// Begins a family of metrics, to which the values that are added next belong. `kind` is `counter` (a number that
    /// only grows until the process ends), `gauge` or `histogram`; `help` is one line.
    pub fn add_family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.text += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self.current_family = name;
    }

    /// Adds a value of a counter or a gauge. Escapes no label, because labels are constants.
    pub fn add_value(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.add_sample("", labels, value);
    }

    /// Adds the family of a gauge that has one value without labels.
    pub fn add_gauge(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.add_family(name, "gauge", help);
        self.add_value(&[], value);
    }

    /// Adds the family of a counter that has one value without labels.
    pub fn add_counter(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.add_family(name, "counter", help);
        self.add_value(&[], value);
    }

    /// Adds the values of a histogram. `bounds` are the upper bounds of its buckets, except of the last, which has none.
    pub(super) fn add_histogram(&mut self, labels: &[(&str, &str)], bounds: &[f64], histogram: &Histogram) {
        let mut count = 0;
        for (at, values) in histogram.bucket_counts[..=bounds.len()].iter().enumerate() {
            count += values;
            let end = bounds.get(at).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            self.add_sample("_bucket", &[labels, &[("le", &end)]].concat(), count);
        }
        self.add_sample("_sum", labels, histogram.sum);
        self.add_sample("_count", labels, count);
    }

    /// Adds a line of the current family: its name with a suffix (as `_sum`), the labels and the value.
    fn add_sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<_> = labels.iter().map(|(name, label)| format!("{name}=\"{label}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        self.text += &format!("{}{suffix}{labels} {value}\n", self.current_family);
    }
}
