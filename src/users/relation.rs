//! [`Relation`]: a record that belongs to another record, its owner. The query that read the owner may also have read
//! the related record.
//!
//! This module knows no SQL: the creator of a relation passes a [`Loader`] in, or forbids loading on access.

use crate::error::Error;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Loads the record that belongs to the owner with this id. Returns `None` if the owner has none. Blocks for one query.
pub type Loader<T> = Arc<dyn Fn(i64) -> Result<Option<T>, Error> + Send + Sync>;

/// A record that belongs to another record, its owner. If the record was not loaded with its owner, the first access
/// loads the record, or fails if loading on access is forbidden.
#[derive(Clone)]
pub struct Relation<T> {
    /// The name of the relation, for the error of a forbidden access.
    name: &'static str,
    /// Empty until the record is loaded; holds `None` if the owner has no such record.
    value: OnceLock<Option<T>>,
    /// The loader and the owner's id; `None` if loading on access is forbidden.
    loader_and_owner: Option<(Loader<T>, i64)>,
}

impl<T> Relation<T> {
    /// Creates a relation that was loaded with its owner.
    pub fn loaded(name: &'static str, value: Option<T>) -> Relation<T> {
        Relation { name, value: OnceLock::from(value), loader_and_owner: None }
    }

    /// Creates a relation that was not loaded. `loader_and_owner` has the loader for the first access and the owner's
    /// id; `None` forbids the access.
    pub fn unloaded(name: &'static str, loader_and_owner: Option<(Loader<T>, i64)>) -> Relation<T> {
        Relation { name, value: OnceLock::new(), loader_and_owner }
    }

    /// Returns whether the record is loaded, so that an access needs no query.
    #[cfg(test)]
    pub fn is_loaded(&self) -> bool {
        self.value.get().is_some()
    }

    /// Returns the related record, or `None` if the owner has none.
    ///
    /// Loads a record that is not loaded, which blocks for one query. Fails with [`Error::LazyLoadingViolation`] if
    /// loading on access is forbidden.
    pub fn get(&self) -> Result<Option<&T>, Error> {
        if self.value.get().is_none() {
            let (load, id) = self.loader_and_owner.as_ref().ok_or(Error::LazyLoadingViolation(self.name))?;
            // Ignores the error of `set`, which means that another thread has loaded the record meanwhile.
            let _ = self.value.set(load(*id)?);
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
