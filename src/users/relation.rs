//! [`Relation`]: a record that belongs to another, and was loaded with it or was not.
//!
//! Knows no SQL: what loads is passed in as a [`Loader`]. Whether loading on access is allowed is decided where
//! the relation is made.

use crate::error::Error;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Fetches the `T` that belongs to the record with this id, or `None` if it has none; one query an access.
pub type Loader<T> = Arc<dyn Fn(i64) -> Result<Option<T>, Error> + Send + Sync>;

/// A related record. An access returns it, loads it first, or is a violation.
#[derive(Clone)]
pub struct Relation<T> {
    name: &'static str,
    value: OnceLock<Option<T>>,
    lazy: Option<(Loader<T>, i64)>,
}

impl<T> Relation<T> {
    /// A relation that was fetched with its owner.
    pub fn loaded(name: &'static str, value: Option<T>) -> Relation<T> {
        Relation { name, value: OnceLock::from(value), lazy: None }
    }

    /// A relation that was not fetched, and what fetches it for its owner's id when it is first accessed. `None`: it
    /// must not be.
    pub fn unloaded(name: &'static str, lazy: Option<(Loader<T>, i64)>) -> Relation<T> {
        Relation { name, value: OnceLock::new(), lazy }
    }

    /// Returns true if the value is loaded, so that an access needs no query.
    #[cfg(test)]
    pub fn is_loaded(&self) -> bool {
        self.value.get().is_some()
    }

    /// Returns the related record, or `None` if the owner has none.
    ///
    /// When it was not loaded: fetches it and keeps it, blocking for one query, where lazy loading is
    /// allowed; else [`Error::LazyLoadingViolation`].
    pub fn get(&self) -> Result<Option<&T>, Error> {
        if self.value.get().is_none() {
            let (loader, owner) = self.lazy.as_ref().ok_or(Error::LazyLoadingViolation(self.name))?;
            // A second thread may have set the value first: both loaded the same record, so either value will do.
            let _ = self.value.set(loader(*owner)?);
        }
        Ok(self.value.get().and_then(Option::as_ref))
    }
}

impl<T> fmt::Debug for Relation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn loaded_lazy_prevented() {
        let loaded = Relation::loaded("r", Some(7));
        assert_eq!(loaded.get().unwrap(), Some(&7));

        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let loader: Loader<i64> = Arc::new(move |owner| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok((owner > 0).then_some(owner * 2))
        });
        let lazy = Relation::unloaded("r", Some((loader.clone(), 21)));
        assert!(!lazy.is_loaded());
        assert_eq!(lazy.get().unwrap(), Some(&42));
        assert_eq!(lazy.get().unwrap(), Some(&42));
        assert_eq!(count.load(Ordering::Relaxed), 1, "one query, then kept");
        assert_eq!(Relation::unloaded("r", Some((loader, 0))).get().unwrap(), None);

        let prevented = Relation::<i64>::unloaded("r", None);
        assert!(matches!(prevented.get(), Err(Error::LazyLoadingViolation("r"))));
    }
}
