//! The files for Prometheus and Grafana in `examples/deploy`, as they stand but for the replicas' addresses and the pace:
//! a real Prometheus scrapes a service under load, and evaluates every query and every alert.

use crate::{
    program, serve,
    support::{BUSY, Client, LONG, Load, Service, TempDir, eventually, free_port},
};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
};

const SCRAPE: &str = include_str!("../../examples/deploy/prometheus.yml");
const ALERTS: &str = include_str!("../../examples/deploy/alerts.yml");
const DASHBOARD: &str = include_str!("../../examples/deploy/dashboard.json");

/// Returns the answer of Prometheus to one query.
fn ask(base_url: &str, path: &str, parameters: &[(&str, &str)]) -> Value {
    let mut request = ureq::get(format!("{base_url}{path}"));
    for (name, value) in parameters {
        request = request.query(name, value);
    }
    let mut answer = request
        .config()
        .http_status_as_error(false)
        .build()
        .call()
        .unwrap_or_else(|error| panic!("{path} {parameters:?}: {error}"));
    answer.body_mut().read_json().unwrap_or_else(|error| panic!("{path} {parameters:?}: {error}"))
}

/// How many series a query has; panics where Prometheus does not understand it.
fn series(base_url: &str, query: &str) -> usize {
    let answer = ask(base_url, "/api/v1/query", &[("query", query)]);
    assert_eq!(answer["status"], "success", "{query}: {answer}");
    answer["data"]["result"].as_array().map_or(0, Vec::len)
}

/// The names of our figures in a query.
fn names(query: &str) -> BTreeSet<&str> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("userd_") || word.starts_with("process_")).collect()
}

/// Runs promtool, which says nothing but what is wrong.
fn promtool(arguments: &[&str], input: Stdio) -> String {
    let mut command = Command::new(program("promtool", "prometheus"));
    command.args(arguments).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/deploy"));
    let output = command.stdin(input).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && !said.to_lowercase().contains("warning"), "{said}");
    said
}

#[test]
fn promtool_accepts_the_files() {
    promtool(&["check", "config", "prometheus.yml"], Stdio::null());
    promtool(&["check", "rules", "alerts.yml"], Stdio::null());
}

#[test]
fn every_query_has_an_answer() {
    let prometheus = program("prometheus", "prometheus");
    let service = Service::start();
    let addr = service.server.addr().unwrap();
    let load = Load::start("scraped", 4, service.server.base_url());
    let mut client = Client::new(service.server.base_url());
    let dir = TempDir::new();
    let theirs = r#"["10.0.0.11:3000", "10.0.0.12:3000", "10.0.0.13:3000"]"#;
    assert!(SCRAPE.contains(theirs) && SCRAPE.contains("15s"));
    let scrape = SCRAPE.replace(theirs, &format!("[\"{addr}\"]")).replace("15s", "200ms");
    dir.write("prometheus.yml", &scrape);
    // All that they ask for within the time that a test has.
    let alerts = ALERTS.replace("[5m]", "[5s]").replace("[15m]", "[5s]").replace("for: 5m", "for: 1s");
    dir.write("alerts.yml", &alerts);
    fs::create_dir(dir.path().join("data")).unwrap();
    let port = free_port();
    let mut command = Command::new(prometheus);
    command
        .arg(format!("--config.file={}", dir.path().join("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let _prometheus = serve(&mut command, Signal::SIGTERM);
    let base_url = format!("http://127.0.0.1:{port}");
    let ready = || ureq::get(format!("{base_url}/-/ready")).call().is_ok();
    eventually(LONG, "Prometheus runs", ready);
    client.post("/users/authenticate", r#"{"email":"ada@example.com","password":"wrong"}"#);
    // Two scrapes with what is counted by now.
    eventually(LONG, "it has scraped", || {
        series(&base_url, r#"rate(userd_batch_size_count{lane="hash"}[5s])"#) > 0
    });

    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            let filled = query.replace("$__rate_interval", "5s").replace("$instance", ".+");
            eventually(BUSY, query, || series(&base_url, &filled) > 0);
            asked.extend(names(query));
        }
    }
    // The dashboard shows every figure that is there.
    let figures = client.get("/metrics").body;
    dir.write("figures", &figures);
    let said = promtool(&["check", "metrics"], fs::File::open(dir.path().join("figures")).unwrap().into());
    assert_eq!(said, "", "{figures}");
    let families = figures.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let shown = |family: &&str| asked.iter().any(|name| name.starts_with(family));
    let hidden: Vec<&str> = families.filter(|family| !shown(family)).collect();
    // Parts of an alert, and the virtual memory, which says little.
    assert_eq!(hidden, ["process_max_fds", "process_start_time_seconds"]);

    for name in names(ALERTS) {
        assert!(series(&base_url, name) > 0, "an alert asks for {name}");
    }
    let rules = ask(&base_url, "/api/v1/rules", &[]);
    let rules = rules["data"]["groups"][0]["rules"].as_array().cloned().expect("a group of rules");
    assert_eq!(rules.len(), ALERTS.matches("- alert:").count());
    // A service that is well raises none of them.
    for rule in &rules {
        let query = rule["query"].as_str().expect("a query");
        assert_eq!(series(&base_url, query), 0, "{rule}");
    }
    // And one whose schema is not the one expected is found by its alert.
    service.database.run("alter table refinery_schema_history rename to away");
    eventually(LONG, "the alert's query finds it", || series(&base_url, "userd_ready == 0") > 0);
    load.stop();
}
