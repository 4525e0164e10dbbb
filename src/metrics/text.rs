//! The text format, 0.0.4: families with their help and kind, and samples with their labels.

use std::fmt::{Display, Write};

/// What Prometheus calls the type of a metric.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// It only grows, until the process ends.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Values by size.
    Histogram,
}

/// A text that is being written. Each value belongs to the last family.
#[derive(Default)]
pub struct Text {
    text: String,
    family: &'static str,
}

impl Text {
    /// Begins a family. `help` is one line.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        self.family = name;
    }

    /// A counter's or a gauge's value. Labels need no escaping: they are constants.
    pub fn value(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.sample("", labels, None, value);
    }

    /// The family of a gauge without labels, and its value.
    pub fn gauge(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.family(name, Kind::Gauge, help);
        self.value(&[], value);
    }

    /// The same of a counter.
    pub fn counter(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.family(name, Kind::Counter, help);
        self.value(&[], value);
    }

    /// A histogram: how many values each bucket has, by its upper end, and the last one beyond these; the sum of all.
    pub fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        ends: &[f64],
        counts: impl Iterator<Item = u64>,
        sum: f64,
    ) {
        let mut count = 0;
        for (at, values) in counts.enumerate() {
            count += values;
            let end = ends.get(at).map_or(&"+Inf" as &dyn Display, |end| end);
            self.sample("_bucket", labels, Some(end), count);
        }
        self.sample("_sum", labels, None, sum);
        self.sample("_count", labels, None, count);
    }

    /// The whole text.
    pub fn end(self) -> String {
        self.text
    }

    fn sample(
        &mut self,
        suffix: &str,
        labels: &[(&str, &str)],
        end: Option<&dyn Display>,
        value: impl Display,
    ) {
        let family = self.family;
        self.push(format_args!("{family}{suffix}"));
        let mut before = '{';
        for (name, label) in labels {
            self.push(format_args!("{before}{name}=\"{label}\""));
            before = ',';
        }
        if let Some(end) = end {
            self.push(format_args!("{before}le=\"{end}\""));
            before = ',';
        }
        let after = if before == ',' { "}" } else { "" };
        self.push(format_args!("{after} {value}\n"));
    }

    fn push(&mut self, text: std::fmt::Arguments) {
        self.text.write_fmt(text).expect("writing to memory does not fail");
    }
}
