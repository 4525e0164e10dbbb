//! Requests that use the published defects of tiny_http 0.12, and what reaches the workers: CVE-2026-66752
//! (Transfer-Encoding), CVE-2026-66753 (CR and LF in fields), pull request 290 (a declared length is allocated). The
//! harness checks that no ticket has fields or a body.

use super::harness::Harness;
use serde_json::json;
use std::sync::atomic::Ordering;

#[test]
fn no_client_reaches_the_defects_of_tiny_http() {
    let harness = Harness::new();
    let request = |fields: &str| format!("POST /x HTTP/1.1\r\nHost: a\r\n{fields}");
    for (fields, status) in [
        ("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        ("Transfer-Encoding: \u{b}chunked\r\n\r\n0\r\n\r\n", 400),
        ("Content-Length: 99999999999\r\n\r\nx", 413),
        ("Origin: a\rX-Smuggled: 1\r\n\r\n", 400),
        ("Origin: a\nX-Smuggled: 1\r\n\r\n", 400),
        ("Origin: a\r\n X-Smuggled: 1\r\n\r\n", 400),
        ("Origin\r: a\r\n\r\n", 400),
    ] {
        assert_eq!(harness.connect().send(request(fields)).answer().status, status, "{fields:?}");
    }
    // Declares a body of an allowed length, and never sends it.
    let mut short = harness.connect();
    short.send(request("Content-Length: 60000\r\n\r\nx")).finish();
    assert!(short.ends());
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 0, "nothing arrives");

    // Shows that a served request reaches its worker as it was sent, and tiny_http not at all.
    let chunked = request(
        "Transfer-Encoding: chunked\r\nX-Smuggled: 1\r\n\r\n5\r\nGET /\r\n0\r\nX-Smuggled: 1\r\n\r\n",
    );
    let arrived = harness.connect().send(chunked).answer().json();
    let fields = json!([["Host", "a"], ["Transfer-Encoding", "chunked"], ["X-Smuggled", "1"]]);
    assert_eq!(arrived, json!({"method": "POST", "target": "/x", "fields": fields, "body": "GET /"}));
    let encoded = "GET /%0d%0aX-Smuggled:%201?%0d%0a HTTP/1.1\r\nHost: a\r\n\r\n";
    let arrived = harness.connect().send(encoded).answer().json();
    let target = "/%0d%0aX-Smuggled:%201?%0d%0a";
    assert_eq!(arrived, json!({"method": "GET", "target": target, "fields": [["Host", "a"]], "body": ""}));
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 2);
}
