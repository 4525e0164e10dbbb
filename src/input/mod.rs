//! Parses the parts of a request other than its path: the body, the preconditions, the idempotency key and the query.
//! Each function parses one part, or refuses the request. No function knows how a route answers.

mod body;
mod conditions;
mod idempotency_key;
mod query;
pub mod validation;

pub use body::parse_body;
pub use conditions::{etag, parse_condition};
pub use idempotency_key::parse_idempotency_key;
pub use query::{parse_list_request, refuse_parameters};
