//! Lets another thread, such as one that handles signals, end a running import before its commit begins, so that
//! nothing of it is stored.

use super::TransferError;
use crate::db::connect::Breaker;
use parking_lot::Mutex;
use std::sync::Arc;

/// Ends an import from another thread, so that nothing of it is left.
#[derive(Clone, Default)]
pub struct Stop(Arc<Mutex<Stage>>);

/// How far an import is.
#[derive(Default)]
pub(super) enum Stage {
    #[default]
    Unconnected,
    Connected(Arc<Breaker>),
    Committing,
    Stopped,
}

impl Stop {
    /// Whether nothing was imported, and nothing will be; otherwise it was too late. Does not block. The process is
    /// expected to end then.
    pub fn now(&self) -> bool {
        let mut stage = self.0.lock();
        match &*stage {
            Stage::Committing => return false,
            Stage::Connected(connection) => connection.shut_down(),
            Stage::Unconnected | Stage::Stopped => {}
        }
        *stage = Stage::Stopped;
        true
    }

    /// Whether [`Stop::now`] has ended the import.
    pub fn has_stopped(&self) -> bool {
        matches!(*self.0.lock(), Stage::Stopped)
    }

    /// Goes on to this stage, unless the import has been stopped.
    pub(super) fn enter(&self, next: Stage) -> Result<(), TransferError> {
        match &mut *self.0.lock() {
            Stage::Stopped => Err(TransferError::Database("stopped".to_owned())),
            stage => {
                *stage = next;
                Ok(())
            }
        }
    }
}
