//! The parts of a request beside its path. Each function parses one part, or refuses the request for it; none knows
//! how a route answers.

mod body;
mod conditions;
mod key;
mod query;
pub mod validation;

pub use body::body;
pub use conditions::{condition, etag};
pub use key::idempotency_key;
pub use query::{list_request, no_query};
