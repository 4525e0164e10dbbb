//! `GET /users`: lists users: a page of all users, the users whose ids follow an id, the user with an address, the
//! users whose addresses begin with a text, or the users with given ids.

use super::{BatchItem, Lane, Operations, Step};
use crate::db::{Failure, empty_if_untranslatable, session::Param};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::input::parse_list_request;
use crate::users::page::{ListRequest, Listing, PageRequest, Selection};
use crate::users::user::User;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::types::Type;
use serde::Serialize;
use std::{collections::HashMap, vec};

/// A request for a list of users.
#[derive(Debug)]
pub struct List(ListRequest);

impl List {
    pub(crate) fn parse(request: &Request, max_per_page: u32) -> Result<List, Error> {
        Ok(List(parse_list_request(request, max_per_page)?))
    }

    pub(super) fn next_step(&self) -> Step {
        let ListRequest { selection, page } = &self.0;
        match selection {
            Selection::Email(_) => Step::in_lane(Lane::Find),
            _ => Step { max_listed_users: page.per_page as usize, ..Step::in_lane(Lane::List) },
        }
    }
}

/// Finds pages of the list of all users. $1: the position of each page's first row, from 0. $2: the most rows of each
/// page. $3: true if positions count from the last user. Returns an empty page as one row of nulls with the total.
///
/// `user_counts` has the number of users in each block of 4096 ids. The statement adds these numbers up to find the
/// block of the first row, and then skips rows from the nearer end of this block.
pub const FIND_PAGES: &str = "
    with blocks as materialized (
        select block, sum(n)::int as n, sum(sum(n)::int) over (order by block rows unbounded preceding) as upto
        from user_counts group by block
    )
    select u.id, u.name, u.email, u.created_at, u.updated_at, u.version, asked.position, asked.total
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
        (select id as first_id from users where id >= b.block << 12 and b.before <= b.behind
            order by id offset b.before limit 1)
        union all
        (select id from users where id < (b.block + 1) << 12 and b.before > b.behind
            order by id desc offset b.behind limit 1)
    ) s on true
    left join lateral (select * from users where id >= s.first_id order by id limit asked.most) u on true
    order by asked.position, case when asked.is_from_end then -u.id else u.id end";

/// Finds the users whose ids follow a given id, for several lists. $1: the given id of each list. $2: the most rows of
/// each list.
pub(crate) const FIND_AFTER_IDS: &str = "
    select u.id, u.name, u.email, u.created_at, u.updated_at, u.version, asked.position, bigint '0' as total
    from unnest($1::bigint[], $2::bigint[]) with ordinality as asked (after, most, position)
    cross join lateral (select * from users where id > asked.after order by id limit asked.most) u
    order by asked.position, u.id";

/// Finds users in the order of addresses, from the first address that is not before $1. $2: the most rows. The last
/// rows may have addresses that do not begin with $1.
pub(crate) const FIND_BY_EMAIL_PREFIX: &str = r#"
    select id, name, email, created_at, updated_at, version, bigint '1' as position, bigint '0' as total from users
    where lower(email::text collate "C") >= lower($1 collate "C")
    order by lower(email::text collate "C") limit $2"#;

/// Finds users by address. Each row has the position of its address in $1, from 1, because two requests may ask for the
/// same address.
pub(crate) const FIND_BY_EMAIL: &str = r#"
    select found.*, asked.position, bigint '1' as total
    from unnest($1::text[]) with ordinality as asked (address, position), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") = lower(asked.address collate "C") limit 1
    ) found"#;

impl Operations {
    /// Finds several pages of the list of all users, with one statement.
    pub fn find_pages(&self, requests: &[PageRequest]) -> Result<Vec<Listing>, Failure> {
        let firsts: Vec<_> = requests.iter().map(|page| page.offset()).collect();
        let limits: Vec<_> = requests.iter().map(|page| i64::from(page.per_page)).collect();
        let from_end: Vec<_> = requests.iter().map(|page| page.is_from_end).collect();
        let params: [Param; 3] =
            [(&firsts, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY), (&from_end, Type::BOOL_ARRAY)];
        self.find_lists(FIND_PAGES, &params, requests.len())
    }

    /// Finds the users whose ids follow a given id, for several lists with one statement. `ids_and_limits` has the given
    /// id and the most users of each list. A list has one user more than this limit if there are more users.
    pub fn find_after_ids(&self, ids_and_limits: &[(i64, u32)]) -> Result<Vec<Listing>, Failure> {
        let (ids, limits): (Vec<_>, Vec<_>) =
            ids_and_limits.iter().map(|(after, most)| (*after, i64::from(*most) + 1)).unzip();
        self.find_lists(FIND_AFTER_IDS, &[(&ids, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY)], ids.len())
    }

    /// Finds at most `max_users` users whose addresses begin with a text. Returns one user more if there are more
    /// users.
    fn find_by_email_prefix(&self, prefix: &str, max_users: u32) -> Result<Listing, Failure> {
        let limit = i64::from(max_users) + 1;
        let lists = self.find_lists(FIND_BY_EMAIL_PREFIX, &[(&prefix, Type::TEXT), (&limit, Type::INT8)], 1);
        let mut listed = empty_if_untranslatable(prefix, lists.map(|mut lists| lists.remove(0)))?;
        let prefix = prefix.to_ascii_lowercase();
        listed.users.retain(|user| user.email.to_ascii_lowercase().starts_with(&prefix));
        Ok(listed)
    }

    /// Executes a statement for `count` lists. Returns the lists in the order of their requests.
    fn find_lists(&self, sql: &'static str, params: &[Param], count: usize) -> Result<Vec<Listing>, Failure> {
        let mut lists: Vec<Listing> = (0..count).map(|_| Listing::default()).collect();
        let rows = if count == 0 { Vec::new() } else { self.pool.execute(sql, params, None)? };
        for row in rows {
            // Converts the position, which the statement counts from 1, into an index.
            let list = &mut lists[row.try_get::<_, i64>("position")? as usize - 1];
            if list.users.is_empty() {
                list.total = row.try_get("total")?;
            }
            // Skips the one row of an empty page, which holds the total alone.
            if row.try_get::<_, Option<i64>>("id")?.is_some() {
                list.users.push(self.read_user(&row)?);
            }
        }
        Ok(lists)
    }

    /// Finds users by address. Returns a list of at most one user for each address.
    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Listing>, Failure> {
        let found = self.find_lists(FIND_BY_EMAIL, &[(&emails, Type::TEXT_ARRAY)], emails.len());
        let [email] = emails else { return found };
        let found = empty_if_untranslatable(email, found.map(|mut lists| lists.remove(0)));
        found.map(|listed| vec![listed])
    }
}

impl List {
    /// Executes requests for lists: one statement for all requests of a kind, but one for each search by a prefix.
    pub(super) fn execute(operations: &Operations, lists: Vec<BatchItem<List>>) {
        let (mut pages, mut walks, mut emails, mut ids) = (vec![], vec![], vec![], vec![]);
        for list in &lists {
            let ListRequest { selection, page } = &list.command.0;
            match selection {
                Selection::All => pages.push(*page),
                Selection::Email(email) => emails.push(email.as_str()),
                Selection::AfterId(id) => walks.push((*id, page.per_page)),
                Selection::Ids(named) => ids.extend(named),
                Selection::EmailPrefix(_) => {}
            }
        }
        let mut pages = operations.find_pages(&pages).map(Vec::into_iter);
        let mut walks = operations.find_after_ids(&walks).map(Vec::into_iter);
        let mut by_email = operations.find_by_email(&emails).map(Vec::into_iter);
        let users = operations.find_by_ids(&ids).map(|users| users.into_iter().map(|user| (user.id, user)));
        let users: Result<HashMap<i64, User>, Failure> = users.map(Iterator::collect);
        for list in lists {
            let ListRequest { selection, page } = &list.command.0;
            let listed = match selection {
                Selection::All => take_next_list(&mut pages),
                Selection::Email(_) => take_next_list(&mut by_email),
                Selection::AfterId(_) => take_next_list(&mut walks),
                Selection::EmailPrefix(prefix) => operations.find_by_email_prefix(prefix, page.per_page),
                // Clones the users for each list, because two lists may have the same user.
                Selection::Ids(ids) => users.as_ref().map_err(Failure::clone).map(|users| {
                    let users = ids.iter().filter_map(|id| users.get(id).cloned()).collect();
                    Listing { total: 0, users }
                }),
            };
            *list.outcome = Some(listed.map(|listed| list.command.answer(listed).into()).into());
        }
    }
}

/// The JSON body of a page. `from` and `to` are the positions of its first and last user among all users, from 1 (both
/// are 0 on an empty page).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PageBody<'a> {
    data: &'a [User],
    total: i64,
    per_page: i64,
    current_page: i64,
    last_page: i64,
    from: i64,
    to: i64,
    has_more_pages: bool,
}

/// The JSON body of a list without page numbers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct UnpagedListBody<'a> {
    data: &'a [User],
    per_page: u32,
    has_more_pages: bool,
}

impl List {
    fn answer(&self, Listing { total, users }: Listing) -> Response {
        let ListRequest { selection, page: request } = &self.0;
        let email = match selection {
            Selection::All => None,
            Selection::Email(email) => Some(email.as_str()),
            unpaged => return answer_unpaged(unpaged, request.per_page, users),
        };
        let PageRequest { page: current_page, per_page, .. } = *request;
        let users = if email.is_some() && current_page > 1 { Vec::new() } else { users };
        let (per_page, count) = (i64::from(per_page), users.len() as i64);
        let last_page = ((total + per_page - 1) / per_page).max(1);
        let before = if users.is_empty() { 0 } else { request.offset() };
        let (from, to, has_more_pages) = (before + count.min(1), before + count, current_page < last_page);
        let body =
            PageBody { data: &users, total, per_page, current_page, last_page, from, to, has_more_pages };
        Response::json(200, &body).with("Link", page_links(*request, last_page, email))
    }
}

/// Answers a list without page numbers: of users after an id, with a prefix, or with given ids. If there are more users
/// after the last one, a list after an id gets a `Link` to them.
fn answer_unpaged(selection: &Selection, per_page: u32, mut users: Vec<User>) -> Response {
    let has_more_pages = users.len() > per_page as usize;
    users.truncate(per_page as usize);
    let response = Response::json(200, &UnpagedListBody { data: &users, per_page, has_more_pages });
    match (selection, users.last()) {
        (Selection::AfterId(_), Some(User { id, .. })) if has_more_pages => {
            response.with("Link", format!("</users?after={id}&perPage={per_page}>; rel=\"next\""))
        }
        _ => response,
    }
}

/// Takes the next list from the result of a statement. Returns a copy of the error if the statement has failed.
fn take_next_list(lists: &mut Result<vec::IntoIter<Listing>, Failure>) -> Result<Listing, Failure> {
    lists.as_mut().map(|lists| lists.next().unwrap_or_default()).map_err(|failure| failure.clone())
}

/// The characters of an address that a `Link` percent-encodes: all but letters, digits and `-._~@`.
const QUERY_ESCAPES: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'@');

/// Returns the field `Link` (RFC 8288) of a page: the first, previous, next and last page, as far as they exist. The
/// references are relative to the server. `email` is the address that the list was asked for.
fn page_links(request: PageRequest, last_page: i64, email: Option<&str>) -> String {
    let PageRequest { page, per_page, is_from_end } = request;
    let mut query = String::new();
    if let Some(email) = email {
        query = format!("email={}&", utf8_percent_encode(email, QUERY_ESCAPES));
    }
    if is_from_end {
        query += "order=desc&";
    }
    let links = [
        (Some(1), "first"),
        // A page beyond the last page has the last page as its previous page.
        ((page > 1).then(|| last_page.min(page - 1)), "prev"),
        ((page < last_page).then(|| page + 1), "next"),
        (Some(last_page), "last"),
    ];
    let links = links.into_iter().filter_map(|(page, relation)| {
        page.map(|page| format!("</users?{query}page={page}&perPage={per_page}>; rel=\"{relation}\""))
    });
    links.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::relation::Relation;
    use serde_json::json;
    use time::OffsetDateTime;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15, is_from_end: false };
    const ALL: fn(PageRequest) -> ListRequest = |page| ListRequest { selection: Selection::All, page };

    #[test]
    fn an_empty_list() {
        let page = List(ALL(FIRST)).answer(Listing::default());
        assert_eq!(
            body_text(page),
            r#"{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
"#
        );
        let far = List(ALL(PageRequest { page: i64::MAX, ..FIRST }));
        let far = far.answer(Listing { total: 31, users: vec![] }).value();
        assert_eq!(
            (&far["lastPage"], &far["hasMorePages"], &far["from"]),
            (&json!(3), &json!(false), &json!(0))
        );
    }

    /// Returns the pages that the links of a page lead to, with 2 of 5 users on each page.
    fn pages(page: i64) -> String {
        let links = page_links(PageRequest { page, per_page: 2, ..FIRST }, 3, None);
        links.replace("</users?page=", "").replace("&perPage=2>; rel=", " ").replace('"', "")
    }

    #[test]
    fn links_of_pages() {
        assert_eq!(pages(1), "1 first, 2 next, 3 last");
        assert_eq!(pages(2), "1 first, 1 prev, 3 next, 3 last");
        assert_eq!(pages(3), "1 first, 2 prev, 3 last");
        assert_eq!(pages(4), "1 first, 3 prev, 3 last");
        assert_eq!(pages(i64::MAX), "1 first, 3 prev, 3 last");
        let from_end = page_links(PageRequest { is_from_end: true, ..FIRST }, 1, None);
        assert!(from_end.starts_with("</users?order=desc&page=1&perPage=15>; rel=\"first\""), "{from_end}");
        let links = page_links(FIRST, 1, Some("ada+news%>\"é@example.com"));
        assert_eq!(
            links,
            "</users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"first\", \
             </users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"last\""
        );
    }

    fn body_text(list: Response) -> String {
        String::from_utf8(list.body).unwrap()
    }

    /// Returns a list of users with these names, from id 4 on.
    fn list(request: ListRequest, names: &[&str]) -> Response {
        let time = OffsetDateTime::UNIX_EPOCH;
        let user = |(id, name): (i64, &&str)| User {
            id,
            name: (*name).to_owned(),
            email: "a@b.co".to_owned(),
            created_at: time,
            updated_at: time,
            version: 1,
            credential: Relation::unloaded("credential", None),
        };
        let users = (4..).zip(names).map(user).collect();
        List(request).answer(Listing { total: 7, users })
    }

    #[test]
    fn lists_of_users() {
        let user = |id: &str, name: &str| {
            let time = "1970-01-01T00:00:00.000000Z";
            json!({"id": id, "name": name, "email": "a@b.co", "createdAt": time, "updatedAt": time})
        };
        let second = ALL(PageRequest { page: 2, per_page: 3, ..FIRST });
        let page = body_text(list(second, &["\"", "\"\""]));
        let expected = json!({
            "data": [user("4", "\""), user("5", "\"\"")], "total": 7, "perPage": 3, "currentPage": 2,
            "lastPage": 3, "from": 4, "to": 5, "hasMorePages": true,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&page).unwrap(), expected);
        let page = PageRequest { per_page: 2, ..FIRST };
        let walk = ListRequest { selection: Selection::AfterId(3), page };
        // Shows two users; the third one only tells that there are more.
        for (names, more) in [(&["a", "b"][..], false), (&["a", "b", "c"], true)] {
            let found = list(walk.clone(), names);
            assert_eq!(found.header("Link"), more.then_some("</users?after=5&perPage=2>; rel=\"next\""));
            let found: serde_json::Value = serde_json::from_str(&body_text(found)).unwrap();
            assert_eq!(
                found,
                json!({"data": [user("4", "a"), user("5", "b")], "perPage": 2, "hasMorePages": more})
            );
        }
    }
}
