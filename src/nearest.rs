//! Which word a person may have meant. Pure.

/// The one of `known` that `word` most likely stands for: it begins so, or a letter or two are wrong, missing, too many
/// or swapped.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Shorter words are like too many others.
    const BEGINNING: usize = 3;
    let word = word.to_ascii_lowercase();
    let rated = known.into_iter().filter_map(|known| {
        let candidate = known.to_ascii_lowercase();
        let most = if candidate.len() > 5 { 2 } else { 1 };
        let begins = word.trim_start_matches('-').len() >= BEGINNING && candidate.starts_with(&word);
        let steps = match word.len().abs_diff(candidate.len()) <= most {
            true => Some(steps(word.as_bytes(), candidate.as_bytes())).filter(|steps| *steps <= most),
            false => None,
        };
        steps.or(begins.then_some(most)).map(|steps| (steps, known))
    });
    rated.min_by_key(|(steps, _)| *steps).map(|(_, known)| known)
}

/// How many letters have to be replaced, inserted, removed or swapped with the next one.
fn steps(from: &[u8], to: &[u8]) -> usize {
    let mut rows = vec![vec![0; to.len() + 1]; from.len() + 1];
    for at in 0..=from.len() {
        for other in 0..=to.len() {
            rows[at][other] = match (at, other) {
                (0, steps) | (steps, 0) => steps,
                _ => {
                    let replaced = rows[at - 1][other - 1] + usize::from(from[at - 1] != to[other - 1]);
                    let least = replaced.min(rows[at - 1][other] + 1).min(rows[at][other - 1] + 1);
                    let swapped =
                        at > 1 && other > 1 && from[at - 1] == to[other - 2] && from[at - 2] == to[other - 1];
                    if swapped { least.min(rows[at - 2][other - 2] + 1) } else { least }
                }
            };
        }
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let known = ["export", "import", "check", "man", "--skip-existing", "--skip-invalid", "--host"];
        for (word, expected) in [
            ("exprot", Some("export")),
            ("Export", Some("export")),
            ("imports", Some("import")),
            ("chekc", Some("check")),
            ("exp", Some("export")),
            ("--skip-exist", Some("--skip-existing")),
            ("--skip-invlaid", Some("--skip-invalid")),
            ("--hots", Some("--host")),
            ("mna", Some("man")),
            ("--", None),
            ("x", None),
            ("", None),
            ("women", None),
            ("something-else", None),
        ] {
            assert_eq!(nearest(word, known), expected, "{word}");
        }
    }
}
