//! The examples run, and say what the README shows.
#![allow(
    clippy::unwrap_used,
    clippy::duplicate_mod,
    reason = "tests; each example has its own day"
)]

#[path = "../examples/positions.rs"]
mod positions;
#[path = "../examples/surveillance.rs"]
mod surveillance;
#[path = "../examples/trade_capture.rs"]
mod trade_capture;
#[path = "../examples/trade_store.rs"]
mod trade_store;

use std::{error::Error, io::Write, path::Path};

type Example = fn(&Path, &mut dyn Write) -> Result<(), Box<dyn Error>>;

fn said(example: Example) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut out = Vec::new();
    example(dir.path(), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// What the README shows of an example: the lines behind the command that runs it.
fn shown(example: &str) -> String {
    let readme = include_str!("../../../README.md");
    let command = format!("$ cargo run --release -p teeline-delivery --example {example}\n");
    let (_, rest) = readme
        .split_once(&command)
        .unwrap_or_else(|| panic!("README.md does not run {example}"));
    let lines = rest
        .lines()
        .take_while(|line| !line.starts_with("$ ") && !line.starts_with("```"));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn positions_are_what_the_readme_shows() {
    assert_eq!(said(positions::run), shown("positions"));
}

#[test]
fn surveillance_is_what_the_readme_shows() {
    assert_eq!(said(surveillance::run), shown("surveillance"));
}

#[test]
fn trade_capture_is_what_the_readme_shows() {
    assert_eq!(said(trade_capture::run), shown("trade_capture"));
}

#[test]
fn the_trade_store_is_what_the_readme_shows() {
    assert_eq!(said(trade_store::run), shown("trade_store"));
}
