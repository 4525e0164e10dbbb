//! Commands on standard input to a service that is thrown away (`--commands`): a line each, answered by a line.

use std::io::{self, BufRead, Write};
use std::{iter, str::FromStr, time::Duration};
use userd::testing::{Control, Fault};

const USAGE: &str = "a command is: reset | save NAME | restore NAME | advance SECONDS | requests [METHOD PATH] | \
                     chance SEED | faults | fail none | \
                     fail (answer-lost | refused | 503 | slow SECONDS | cut BYTES) METHOD PATH [TIMES | CHANCE%]";

/// Executes the lines of standard input, to its end.
pub fn execute_lines(control: &Control) {
    for line in io::stdin().lock().split(b'\n').map_while(Result::ok) {
        let answer = execute(control, &String::from_utf8_lossy(&line));
        // A harness may have closed standard output.
        let _ = writeln!(io::stdout(), "{}", answer.unwrap_or_else(|problem| format!("error {problem}")));
    }
}

fn execute(control: &Control, line: &str) -> Result<String, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["reset"] => control.restore(None)?,
        ["save", name] => control.save(Some(name))?,
        ["restore", name] => control.restore(Some(name))?,
        ["advance", seconds] => control.advance(time(seconds)?)?,
        ["faults"] => return Ok(format!("ok {}", control.faults_left())),
        ["fail", "none"] => control.fail_none(),
        ["fail", "answer-lost", ref on @ ..] => fail(control, Fault::AnswerLost, on)?,
        ["fail", "refused", ref on @ ..] => fail(control, Fault::Refused, on)?,
        ["fail", "503", ref on @ ..] => fail(control, Fault::Unavailable, on)?,
        ["fail", "slow", seconds, ref on @ ..] => fail(control, Fault::Slow(time(seconds)?), on)?,
        ["fail", "cut", bytes, ref on @ ..] => fail(control, Fault::Cut(number(bytes)?), on)?,
        ["requests"] => return Ok(requests(control, None)),
        ["requests", method, path] => return Ok(requests(control, Some(&format!("{method} {path}")))),
        ["chance", seed] => control.chance(number(seed)?),
        _ => return Err(USAGE.to_owned()),
    }
    Ok("ok".to_owned())
}

/// Returns `ok`, the number of requests and of those that have gone, and a line for each.
fn requests(control: &Control, on: Option<&str>) -> String {
    let (lines, gone) = control.requests(on);
    let answer = format!("ok {} {gone}", lines.len());
    iter::once(answer).chain(lines).collect::<Vec<_>>().join("\n")
}

fn fail(control: &Control, fault: Fault, on: &[&str]) -> Result<(), String> {
    match *on {
        [method, path] => control.fail(fault, method, path, "1"),
        [method, path, often] => control.fail(fault, method, path, often),
        _ => Err(USAGE.to_owned()),
    }
}

fn number<N: FromStr>(word: &str) -> Result<N, String> {
    word.parse().map_err(|_| format!("{word:?} is no such number; {USAGE}"))
}

fn time(seconds: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(number(seconds)?).map_err(|error| format!("{seconds}: {error}"))
}
