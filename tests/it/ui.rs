//! `/ui`: the page for the browser, what confines it, and where it is served. What it does is tested in a browser:
//! `.ci/browser`.

use crate::support::{Process, Service, TOKEN, TempDir};
use base64ct::{Base64, Encoding};
use sha2::{Digest, Sha256};
use userd::{Config, Schema, Ui};

const PAGE: &str = include_str!("../../web/ui.html");

#[test]
fn the_page_and_what_confines_it() {
    // It asks for no token: it has no rights.
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let answer = service.client().get("/ui");
    let page = page(r#"{"maxPerPage":1000,"required":["name","email"]}"#);
    assert_eq!((answer.status, answer.body.as_str()), (200, page.as_str()));
    assert!(PAGE.len() <= 32 << 10, "{} bytes", PAGE.len());
    let mut policy: Vec<&str> =
        answer.header("Content-Security-Policy").expect("a policy").split("; ").collect();
    policy.sort_unstable();
    let [script, style] = ["script", "style"].map(|element| {
        let (begin, end) = (format!("<{element}>"), format!("</{element}>"));
        assert_eq!(PAGE.matches(&begin).count(), 1, "{element}");
        let (_, rest) = PAGE.split_once(&begin).expect("it is there");
        let (text, _) = rest.split_once(&end).expect("it ends");
        format!("{element}-src 'sha256-{}'", Base64::encode_string(&Sha256::digest(text)))
    });
    let expected = [
        "base-uri 'none'",
        "connect-src 'self'",
        "default-src 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "img-src data:",
        "require-trusted-types-for 'script'",
        &script,
        &style,
        "trusted-types 'none'",
    ];
    assert_eq!(policy, expected);
    // Like /openapi.json, it ignores a query. It is no way around the token.
    service.check(format!(
        r#"
        GET /ui => 200 <Content-Type: text/html; charset=utf-8> <Cache-Control: private, no-cache> <Cross-Origin-Opener-Policy: same-origin> <Cross-Origin-Resource-Policy: same-origin> <X-Content-Type-Options: nosniff> <Referrer-Policy: no-referrer> *
        HEAD /ui?x=1 => 200 <Content-Length: {}>
        GET /users => 401 *
        "#,
        page.len()
    ));
}

/// Returns the page with these settings in it.
fn page(settings: &str) -> String {
    PAGE.replacen("data-settings='{}'", &format!("data-settings='{settings}'"), 1)
}

#[test]
fn the_page_knows_the_settings() {
    let service = Service::with(|config| {
        config.max_per_page = 10;
        config.schema = Schema::Strict;
    });
    let expected = page(r#"{"maxPerPage":10,"required":["name","email","password"]}"#);
    assert_eq!(service.client().get("/ui").body, expected);
}

/// `auto` serves it to this machine alone; `true` and `false` are what they say.
#[test]
fn where_it_is_served() {
    let [loopback, everywhere] = ["127.0.0.1", "0.0.0.0"];
    let dir = TempDir::new();
    let socket = format!("unix:{}/socket", dir.name());
    let rows = [
        (loopback, "", Ui::Auto, 200),
        ("localhost", "", Ui::Auto, 200),
        (everywhere, "", Ui::Auto, 404),
        (loopback, "192.0.2.7", Ui::Auto, 404),
        (everywhere, "192.0.2.7", Ui::On, 200),
        (loopback, "", Ui::Off, 404),
        (&socket, "", Ui::Auto, 404),
        (&socket, "", Ui::On, 200),
    ];
    for (host, proxies, ui, status) in rows {
        let service = Service::with(|config: &mut Config| {
            config.host = host.to_owned();
            config.limits.trusted_proxies = proxies.parse().expect("a list");
            config.api_token = Some(TOKEN.into());
            config.ui = ui;
        });
        assert_eq!(service.client().get("/ui").status, status, "{host} {proxies:?} {ui:?}");
    }
}

#[test]
fn the_log_has_its_address() {
    let database = crate::support::Database::create();
    for (ui, status) in [("auto", 200), ("false", 404)] {
        let mut process = Process::on(&database, &[("UI", ui)]);
        let url = process.wait_for_url();
        assert_eq!(process.client().get("/ui").status, status);
        process.logs("GET /ui ");
        assert_eq!(process.stderr().contains(&format!("{url}/ui")), status == 200, "{}", process.stderr());
    }
}
