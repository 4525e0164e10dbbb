//! Creates a user for each line of standard input, with ureq and three tries. Part of `.ci/retries`, which makes the table
//! of docs/testing.md.

fn main() {
    let url = std::env::args().nth(1).expect("the URL of /users");
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (key, body) = line.split_once(' ').expect("a key and a body");
        let create = || {
            let request = agent.post(&url);
            let request = if key == "-" { request } else { request.header("Idempotency-Key", key) };
            request.send(body).ok().map(|answer| answer.status().as_u16())
        };
        println!("{}", (0..3).find_map(|_| create()).unwrap_or(0));
    }
}
