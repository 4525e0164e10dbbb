//! Whether a database has the migrations that it has to have.

use super::{BUILT_IN, built_in};
use postgres::Row;
use std::collections::BTreeSet;

/// About a database that has the built-in migrations in another form.
const BEFORE_THE_FIRST_RELEASE: &str = "a userd from before the first release has made its tables, which this one \
    cannot use: that version's own `userd export` moves the users to a new database (of a directory of --embedded: \
    while that version runs on it once more)";

/// The migrations that a database has to have, by number and checksum.
#[derive(Clone)]
pub struct Schema(pub(super) BTreeSet<(i64, String)>);

/// Whether a database has the migrations that it has to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// All, and no others.
    All,
    /// All, and newer ones, up to this, that are compatible.
    AndNewer(i64),
    /// Some are missing, or are others.
    No,
}

impl Schema {
    /// What [`Schema::judge`] looks at. The last column says whether the server takes no changes.
    pub const ASK: &str = "select version::bigint, checksum::text, \
        pg_catalog.obj_description('refinery_schema_history'::regclass, 'pg_class'), \
        pg_catalog.current_setting('transaction_read_only') operator(pg_catalog.=) 'on' from refinery_schema_history";

    /// Whether these were applied. The error is one line: there are newer ones that are not compatible.
    pub fn judge(&self, rows: &[Row]) -> Result<Applied, String> {
        let mark: Option<String> = rows.first().and_then(|row| row.get(2));
        judge(&applied(rows), &self.0, mark.as_deref())
    }
}

/// Whether a release with our migrations can use a database with those that were applied. The last migration says so
/// itself, in a comment on the history table: "migration 4 is compatible with migration 3".
pub(super) fn judge(
    applied: &BTreeSet<(i64, String)>,
    ours: &BTreeSet<(i64, String)>,
    mark: Option<&str>,
) -> Result<Applied, String> {
    if !ours.is_subset(applied) {
        let is_built_in = |(version, _): &(i64, String)| BUILT_IN.iter().any(|(known, _)| known == version);
        return match *ours == built_in() && applied.difference(ours).any(is_built_in) {
            true => Err(BEFORE_THE_FIRST_RELEASE.to_owned()),
            false => Ok(Applied::No),
        };
    }
    let newest = |migrations: &BTreeSet<(i64, String)>| migrations.iter().map(|(version, _)| *version).max();
    let (found, known) = (newest(applied).unwrap_or_default(), newest(ours).unwrap_or_default());
    let all_others_are_newer = applied.difference(ours).all(|(version, _)| *version > known);
    let numbers =
        mark.and_then(|mark| mark.strip_prefix("migration ")?.split_once(" is compatible with migration "));
    let (last, oldest) = numbers.unwrap_or_default();
    let compatible = last.parse() == Ok(found) && oldest.parse::<i64>().is_ok_and(|oldest| oldest <= known);
    match applied.len() == ours.len() {
        true => Ok(Applied::All),
        // refinery says which one it misses.
        false if !all_others_are_newer => Ok(Applied::No),
        false if compatible => Ok(Applied::AndNewer(found)),
        false => Err(format!(
            "a newer userd has migrated it, to migration {found}; this one knows those up to {known}, and no later \
             one says that it is compatible with them"
        )),
    }
}

/// The versions and checksums of the migrations that were applied, of the rows of [`Schema::ASK`].
pub(super) fn applied(history: &[Row]) -> BTreeSet<(i64, String)> {
    history.iter().map(|row| (row.get(0), row.get(1))).collect()
}
