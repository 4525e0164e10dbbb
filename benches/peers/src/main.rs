//! The least that an async service does for userd's requests: no validation, no limits, no log.
//!
//! `peers pool PORT DATABASE_URL`: one runtime, eight pooled connections, cached statements.
//! `peers own PORT DATABASE_URL`: a runtime for each of two cores, which shares nothing with the other: a listener
//! (SO_REUSEPORT) and four pipelined connections of its own, taken in turn.
use axum::{
    Json, Router,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
    serve::ListenerExt,
};
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use serde::{Deserialize, Serialize};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use time::OffsetDateTime;
use tokio_postgres::{Client, NoTls, Row, Statement, error::SqlState, types::ToSql};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const COLUMNS: &str = "id, name, email, created_at, updated_at";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct User {
    id: String,
    name: String,
    email: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

impl From<&Row> for User {
    fn from(row: &Row) -> User {
        User {
            id: row.get::<_, i64>(0).to_string(),
            name: row.get(1),
            email: row.get(2),
            created_at: row.get(3),
            updated_at: row.get(4),
        }
    }
}

struct Piped {
    client: Client,
    find: Statement,
    count: Statement,
    page: Statement,
    create: Statement,
    update: Statement,
    delete: Statement,
    look_up: Statement,
}

enum Db {
    Pool(Pool),
    /// Taken in turn.
    Pipe(Vec<Piped>, AtomicUsize),
}

fn sql() -> [String; 7] {
    [
        format!("select {COLUMNS} from users where id = $1"),
        "select count(*) from users".to_owned(),
        format!("select {COLUMNS} from users order by id limit $1 offset $2"),
        format!("insert into users (name, email) values ($1, $2) returning {COLUMNS}"),
        format!(
            "update users set name = coalesce($2, name), email = coalesce($3, email), updated_at = now() where id = $1 returning {COLUMNS}"
        ),
        "delete from users where id = $1 returning id".to_owned(),
        format!("select {COLUMNS} from users where lower(email) = lower($1)"),
    ]
}

impl Db {
    async fn rows(
        &self,
        which: usize,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        match self {
            Db::Pool(pool) => {
                let client = pool.get().await.expect("a connection");
                let statement = client.prepare_cached(&sql()[which]).await?;
                client.query(&statement, params).await
            }
            Db::Pipe(piped, turn) => {
                let piped = &piped[turn.fetch_add(1, Ordering::Relaxed) % piped.len()];
                let statement = [
                    &piped.find,
                    &piped.count,
                    &piped.page,
                    &piped.create,
                    &piped.update,
                    &piped.delete,
                    &piped.look_up,
                ][which];
                piped.client.query(statement, params).await
            }
        }
    }
}

fn error(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

async fn find(State(db): State<Arc<Db>>, Path(id): Path<i64>) -> Response {
    match db.rows(0, &[&id]).await {
        Ok(rows) => rows.first().map_or_else(
            || error(StatusCode::NOT_FOUND, "Not found"),
            |row| Json(User::from(row)).into_response(),
        ),
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "Database error"),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageQuery {
    page: Option<i64>,
    per_page: Option<i64>,
    email: Option<String>,
}

async fn list(State(db): State<Arc<Db>>, Query(query): Query<PageQuery>) -> Response {
    if let Some(email) = query.email {
        let data: Vec<User> =
            db.rows(6, &[&email]).await.expect("a user or none").iter().map(User::from).collect();
        return Json(
            serde_json::json!({ "data": data, "total": data.len(), "perPage": 15, "currentPage": 1 }),
        )
        .into_response();
    }
    let (page, per_page) = (query.page.unwrap_or(1), query.per_page.unwrap_or(15));
    let total: i64 = db.rows(1, &[]).await.expect("a count")[0].get(0);
    let rows = db.rows(2, &[&per_page, &((page - 1) * per_page)]).await.expect("a page");
    let data: Vec<User> = rows.iter().map(User::from).collect();
    Json(serde_json::json!({ "data": data, "total": total, "perPage": per_page, "currentPage": page }))
        .into_response()
}

#[derive(Deserialize)]
struct NewUser {
    name: String,
    email: String,
}

async fn create(State(db): State<Arc<Db>>, Json(new): Json<NewUser>) -> Response {
    match db.rows(3, &[&new.name, &new.email]).await {
        Ok(rows) => (StatusCode::CREATED, Json(User::from(&rows[0]))).into_response(),
        Err(e) if e.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            error(StatusCode::CONFLICT, "Already exists")
        }
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "Database error"),
    }
}

#[derive(Deserialize)]
struct Changes {
    name: Option<String>,
    email: Option<String>,
}

async fn update(State(db): State<Arc<Db>>, Path(id): Path<i64>, Json(changes): Json<Changes>) -> Response {
    match db.rows(4, &[&id, &changes.name, &changes.email]).await {
        Ok(rows) => rows.first().map_or_else(
            || error(StatusCode::NOT_FOUND, "Not found"),
            |row| Json(User::from(row)).into_response(),
        ),
        Err(e) if e.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            error(StatusCode::CONFLICT, "Already exists")
        }
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "Database error"),
    }
}

async fn remove(State(db): State<Arc<Db>>, Path(id): Path<i64>) -> Response {
    match db.rows(5, &[&id]).await {
        Ok(rows) if rows.is_empty() => error(StatusCode::NOT_FOUND, "Not found"),
        Ok(_) => StatusCode::NO_CONTENT.into_response(),
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "Database error"),
    }
}

async fn piped(config: &tokio_postgres::Config, connections: usize) -> Db {
    let mut all = Vec::new();
    for _ in 0..connections {
        let (client, connection) = config.connect(NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let [find, count, page, create, update, delete, look_up] = sql();
        all.push(Piped {
            find: client.prepare(&find).await.unwrap(),
            count: client.prepare(&count).await.unwrap(),
            page: client.prepare(&page).await.unwrap(),
            create: client.prepare(&create).await.unwrap(),
            update: client.prepare(&update).await.unwrap(),
            delete: client.prepare(&delete).await.unwrap(),
            look_up: client.prepare(&look_up).await.unwrap(),
            client,
        });
    }
    Db::Pipe(all, AtomicUsize::new(0))
}

async fn serve(db: Db, port: u16) {
    let app = Router::new()
        .route("/users/{id}", get(find).put(update).delete(remove))
        .route("/users", get(list).post(create))
        .with_state(Arc::new(db));
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseport(true).unwrap();
    socket.bind(([127, 0, 0, 1], port).into()).expect("a port");
    let listener = socket.listen(1024).unwrap();
    axum::serve(
        listener.tap_io(|stream| {
            let _ = stream.set_nodelay(true);
        }),
        app,
    )
    .await
    .unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (kind, port) = (arguments[1].clone(), arguments[2].parse::<u16>().unwrap());
    let config: tokio_postgres::Config = arguments[3].parse().expect("a database URL");
    if kind == "own" {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let config = config.clone();
                std::thread::spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async { serve(piped(&config, 4).await, port).await })
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let manager =
            Manager::from_config(config, NoTls, ManagerConfig { recycling_method: RecyclingMethod::Fast });
        serve(Db::Pool(Pool::builder(manager).max_size(8).build().expect("a pool")), port).await;
    });
}
