//! `GET /ui`: the page for the browser, `web/ui.html`, and the fields that confine it.
//!
//! It has no rights: it asks `/users` as any client does, with a token that a person types in.

use super::preconditions::each_tag;
use crate::http::{Request, Response};
use base64ct::{Base64, Encoding};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

/// The page: one script and one style, both inline.
const TEXT: &str = include_str!("../../web/ui.html");

/// Names the state of the page, as the text of its tag.
static STATE: LazyLock<String> = LazyLock::new(|| digest(TEXT));

/// Admits that script and that style, and requests to the service itself; nothing else, and no text as markup. Images
/// within the page alone: an empty one keeps browsers from asking for an icon.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(|element| digest(inline(element)));
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; \
         img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
});

/// The answer: the page, or 304 where the browser has it.
pub(super) fn answer(request: &Request) -> Response {
    let response = match has_it(request) {
        true => Response::not_modified(),
        false => Response { status: 200, body: TEXT.into(), ..Response::no_content() }
            .with("Content-Type", "text/html; charset=utf-8"),
    };
    response
        .with("ETag", format!("\"{}\"", *STATE))
        .with("Cache-Control", "no-cache")
        .with("Content-Security-Policy", POLICY.as_str())
        .with("Cross-Origin-Opener-Policy", "same-origin")
        .with("Cross-Origin-Resource-Policy", "same-origin")
        .with("Referrer-Policy", "no-referrer")
}

/// Whether If-None-Match names the page; weak comparison. A field that is no list of tags names nothing.
fn has_it(request: &Request) -> bool {
    request.fields("if-none-match").any(|value| {
        let mut is_named = false;
        let is_list = each_tag(value, |text, _| is_named |= text == *STATE).is_some();
        value.trim() == "*" || is_list && is_named
    })
}

fn digest(text: &str) -> String {
    Base64::encode_string(&Sha256::digest(text))
}

/// What the page's only element of this name holds.
fn inline(element: &str) -> &'static str {
    let (_, rest) = TEXT.split_once(&format!("<{element}>")).expect("the page has it");
    rest.split_once(&format!("</{element}>")).expect("it ends").0
}
