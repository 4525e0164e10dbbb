//! The parts of a request beside its path. Each function parses one part, or refuses the request for it; none knows
//! how a route answers.

mod body;
mod conditions;
mod key;
mod query;
pub mod validation;

pub use body::parse_body;
pub use conditions::{etag, parse_condition};
pub use key::idempotency_key;
pub use query::{parse_list_request, refuse_query};
