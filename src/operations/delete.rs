//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::{Lane, Needs, Outcome};
use crate::http::{Request, Response};
use crate::{db::Delete, error::Error, input};

impl Delete {
    pub(super) fn parse(request: &Request, id: Option<i64>) -> Result<Delete, Error> {
        let condition = input::condition(request)?;
        Ok(Delete { id: id.ok_or(Error::NotFound)?, condition })
    }

    pub(super) fn needs(&self) -> Needs {
        let lane = if self.condition.is_simple() { Lane::Change } else { Lane::Single };
        Needs::row(lane, self.id)
    }

    pub(super) fn answer(&mut self, (): ()) -> Outcome {
        Ok(Some(Response::no_content()))
    }
}
