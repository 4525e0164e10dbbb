//! Reads of lists: pages, walks, and searches by the beginning of an address.

use super::Users;
use crate::db::{session::Param, sqlstate::none_if_untranslatable};
use crate::error::Error;
use crate::users::pagination::{Listed, PageRequest};
use postgres::types::Type;

/// $1: the positions of the pages' first rows, from 0. $2: the most rows. $3: true if positions count from the last user. The
/// first row of a page is looked up from the nearer end of its block. An empty page is one row of nulls with
/// the total. See `V2__user_counts.sql`.
const PAGES: &str = "
    with blocks as materialized (
        select block, sum(n)::int as n, sum(sum(n)::int) over (order by block rows unbounded preceding) as upto
        from user_counts group by block
    )
    select u.id, name, email, u.created_at, u.updated_at, version, position, total
    from (
        select position, total, is_from_end,
            case when is_from_end then greatest(rest - most, 0) else first end as first,
            case when is_from_end then least(rest, most) else most end as most
        from unnest($1::bigint[], $2::bigint[], $3::boolean[]) with ordinality as asked (first, most, is_from_end, position),
            (select coalesce(max(upto), 0)::bigint as total from blocks) counted,
            lateral (select greatest(total - first, 0) as rest) remaining
    ) asked
    left join lateral (
        select block, first - (upto - n) as before, upto - 1 - first as behind
        from blocks where first >= upto - n and first < upto limit 1
    ) b on true
    left join lateral (
        (select id as first_id from users where id >= block << 12 and before <= behind
            order by id offset before limit 1)
        union all
        (select id from users where id < (block + 1) << 12 and before > behind
            order by id desc offset behind limit 1)
    ) s on true
    left join lateral (select * from users where id >= first_id order by id limit most) u on true
    order by position, case when is_from_end then -u.id else u.id end";

/// $1: the ids that the users follow; else as [`PAGES`].
const WALKS: &str = "
    select u.id, name, email, u.created_at, u.updated_at, version, position, bigint '0' as total
    from unnest($1::bigint[], $2::bigint[]) with ordinality as asked (after, most, position)
    cross join lateral (select * from users where id > after order by id limit most) u
    order by position, u.id";

/// $1: how addresses begin. $2: the most rows; they may end with addresses that begin otherwise.
const BY_PREFIX: &str = r#"
    select id, name, email, created_at, updated_at, version, bigint '1' as position, bigint '0' as total from users
    where lower(email::text collate "C") >= lower($1 collate "C")
    order by lower(email::text collate "C") limit $2"#;

impl Users {
    pub fn pages(&self, asked: &[PageRequest]) -> Result<Vec<Listed>, Error> {
        let firsts: Vec<_> = asked.iter().map(|page| page.offset()).collect();
        let limits: Vec<_> = asked.iter().map(|page| i64::from(page.per_page)).collect();
        let from_end: Vec<_> = asked.iter().map(|page| page.is_from_end).collect();
        let params: [Param; 3] =
            [(&firsts, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY), (&from_end, Type::BOOL_ARRAY)];
        self.lists(PAGES, &params, asked.len())
    }

    pub fn walks(&self, asked: &[(i64, u32)]) -> Result<Vec<Listed>, Error> {
        let (ids, limits): (Vec<_>, Vec<_>) =
            asked.iter().map(|(after, most)| (*after, i64::from(*most) + 1)).unzip();
        self.lists(WALKS, &[(&ids, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY)], asked.len())
    }

    pub fn list_by_prefix(&self, prefix: &str, most: u32) -> Result<Listed, Error> {
        let most = i64::from(most) + 1;
        let lists = self.lists(BY_PREFIX, &[(&prefix, Type::TEXT), (&most, Type::INT8)], 1);
        let mut listed = none_if_untranslatable(prefix, lists.map(|mut lists| lists.remove(0)))?;
        let prefix = prefix.to_ascii_lowercase();
        listed.users.retain(|user| user.email.to_ascii_lowercase().starts_with(&prefix));
        Ok(listed)
    }

    pub(super) fn lists(
        &self,
        sql: &'static str,
        asked: &[Param],
        count: usize,
    ) -> Result<Vec<Listed>, Error> {
        let mut lists: Vec<Listed> = (0..count).map(|_| Listed::default()).collect();
        let rows = if count == 0 { Vec::new() } else { self.pool.execute(sql, asked, None)? };
        for row in rows {
            // The statement counts positions from 1.
            let list = &mut lists[row.try_get::<_, i64>("position")? as usize - 1];
            list.total = row.try_get("total")?;
            // The one row of an empty page holds the total alone.
            if row.try_get::<_, Option<i64>>("id")?.is_some() {
                list.users.push(self.user(&row)?);
            }
        }
        Ok(lists)
    }
}
