//! The mechanical part of how teeline is written, so that reviews are about ideas.

use std::collections::{BTreeMap, BTreeSet};

use teeline_tidy::{Source, packages, read, root, sources};
use toml::Table;

/// Crates that may say `unsafe`. All others forbid it.
const UNSAFE: [&str; 3] = ["os", "ring", "latency"];

/// Where the models of loom run: here, atomics and cells come from `teeline_sync`, so that loom sees them. (A lint
/// cannot tell: it looks through the re-export.)
const MODELLED: [&str; 4] = ["core", "os", "ring", "latency"];

/// The files there that need the real ones: mapped words, which loom cannot watch, and sleeping on them.
const MAPPED_WORDS: [&str; 2] = ["crates/os/src/futex.rs", "crates/os/src/mapping.rs"];

/// The rows of the hazards list that this version answers: faults that users of comparable systems reported.
const HAZARDS: [&str; 44] = [
    "RB-01", "RB-03", "RB-04", "RB-05", "RB-06", "RB-07", "RB-08", "RB-09", "RB-10", "RB-12",
    "RB-13", "RB-14", "RB-15", "RB-16", "RB-17", "RB-18", "RB-20", "RB-21", "MC-01", "MC-03",
    "MC-04", "MC-06", "MC-07", "MC-08", "MC-09", "MC-10", "MC-11", "LG-01", "LG-02", "LG-03",
    "LG-04", "LG-05", "LG-07", "LG-09", "LG-10", "GD-01", "GD-02", "GD-04", "GD-06", "GD-07",
    "GD-08", "GD-09", "GD-10", "LT-01",
];

/// Documents that a reader expects.
const DOCUMENTS: [&str; 7] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "docs/testing.md",
];

/// Fails with every finding, not only the first.
#[track_caller]
fn expect_none(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

/// `teeline-ring` is `ring`; the command itself is `cli`.
fn short(package: &str) -> &str {
    match package {
        "teeline" => "cli",
        other => other.strip_prefix("teeline-").unwrap_or(other),
    }
}

fn manifest(path: &str) -> Table {
    read(path)
        .parse()
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Who may depend on whom stands in the table of ARCHITECTURE.md.
#[test]
fn crates_use_only_what_the_architecture_lets_them() {
    let architecture = read("ARCHITECTURE.md");
    let edges = edges(&architecture);
    let mut findings = Vec::new();
    for package in packages() {
        let name = short(&package.name);
        let Some(allowed) = edges.get(name) else {
            findings.push(format!("{name} is not in the table"));
            continue;
        };
        let needed = package.needs.iter().map(|needed| short(needed));
        let wrong = needed.filter(|needed| !allowed.contains(needed));
        findings.extend(wrong.map(|needed| format!("{name} -> {needed}")));
    }
    expect_none("edges that ARCHITECTURE.md does not have", &findings);
}

#[test]
fn crates_from_outside_are_used_where_the_architecture_says() {
    let architecture = read("ARCHITECTURE.md");
    let mut findings = Vec::new();
    for row in table(&architecture, "| crate | used in | for | and not for |") {
        let used: BTreeSet<String> = packages()
            .iter()
            .filter(|package| package.outside.iter().any(|name| name == row[0]))
            .map(|package| short(&package.name).to_owned())
            .collect();
        let used = Vec::from_iter(used).join(", ");
        if used != row[1] {
            findings.push(format!("{} is used in {used}, not in {}", row[0], row[1]));
        }
    }
    expect_none("outside crates and who uses them", &findings);
}

fn edges(architecture: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    table(architecture, "| crate | owns | may use |")
        .map(|row| (row[0], row[2].split(", ").collect()))
        .collect()
}

/// The rows of the table with that header: cells without blanks and backquotes around them.
fn table<'a>(text: &'a str, header: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    text.lines()
        .skip_while(move |line| *line != header)
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|row| {
            let cells = row.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().trim_matches('`')).collect()
        })
}

#[test]
fn every_outside_dependency_has_its_reason() {
    let text = read("Cargo.toml");
    let dependencies = text
        .lines()
        .skip_while(|line| *line != "[workspace.dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['));
    let without: Vec<String> = dependencies
        .filter(|line| line.contains(" = ") && !line.contains("path = "))
        .filter(|line| {
            line.split_once("# ")
                .is_none_or(|(_, reason)| reason.len() < 10)
        })
        .map(str::to_owned)
        .collect();
    expect_none(
        "dependencies without a comment that says what for",
        &without,
    );
}

#[test]
fn crates_take_dependencies_and_facts_from_the_workspace() {
    let mut findings = Vec::new();
    for source in sources() {
        if !source.path.ends_with("/Cargo.toml") {
            continue;
        }
        let manifest = manifest(&source.path);
        for fact in ["version", "edition", "rust-version", "license", "publish"] {
            if manifest["package"][fact].get("workspace").is_none() {
                findings.push(format!("{}: {fact}", source.path));
            }
        }
        if manifest
            .get("lints")
            .and_then(|lints| lints.get("workspace"))
            .is_none()
        {
            findings.push(format!("{}: lints", source.path));
        }
        let mut tables = vec![&manifest];
        let targets = manifest
            .get("target")
            .and_then(|targets| targets.as_table());
        tables.extend(
            targets
                .into_iter()
                .flatten()
                .filter_map(|(_, table)| table.as_table()),
        );
        for table in tables {
            for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
                let named = table.get(kind).and_then(|named| named.as_table());
                for (name, how) in named.into_iter().flatten() {
                    // A crate that turns its own test switches on names itself by path.
                    let itself = manifest["package"]["name"].as_str() == Some(name);
                    if !itself && how.get("workspace").is_none() {
                        findings.push(format!("{}: {name}", source.path));
                    }
                }
            }
        }
    }
    expect_none("manifests that do not say `workspace = true`", &findings);
}

#[test]
fn readme_states_the_compiler_and_the_two_commands() {
    let readme = read("README.md");
    let rust_version = &manifest("Cargo.toml")["workspace"]["package"]["rust-version"];
    let rust_version = rust_version.as_str().expect("a version is a text");
    assert!(
        readme.contains(&format!("Rust {rust_version}")),
        "README.md does not name Rust {rust_version}, which Cargo.toml requires"
    );
    let commands: Vec<&str> = fenced_lines(&readme)
        .filter(|line| line.starts_with("cargo "))
        .take(2)
        .collect();
    assert_eq!(
        commands,
        ["cargo run --release -- demo", "cargo test --workspace"]
    );
}

/// The lines of a Markdown text that stand in fenced blocks.
fn fenced_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        inside ^= fence;
        inside && !fence
    })
}

#[test]
fn expected_documents_exist_and_the_changelog_begins_with_what_is_unreleased() {
    let missing: Vec<String> = DOCUMENTS
        .into_iter()
        .filter(|path| !root().join(path).is_file())
        .map(str::to_owned)
        .collect();
    expect_none("missing documents", &missing);
    let changelog = read("CHANGELOG.md");
    let first = changelog.lines().find(|line| line.starts_with("## "));
    assert_eq!(first, Some("## Unreleased"));
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut findings = Vec::new();
    for source in sources() {
        if !source.path.ends_with(".md") {
            continue;
        }
        let folder = root().join(&source.path);
        let folder = folder.parent().expect("a file lies in a folder");
        for link in source.text.split("](").skip(1) {
            let target = link.split([')', '#', ' ']).next().unwrap_or_default();
            let outside = target.contains("://") || target.is_empty();
            if !outside && !folder.join(target).exists() {
                findings.push(format!("{}: {target}", source.path));
            }
        }
    }
    expect_none("links to nothing", &findings);
}

#[test]
fn no_file_knows_the_machine_it_was_written_on() {
    let private = ["/root/", "/home/", "/work/", "/Users/"];
    let mut findings = Vec::new();
    for source in sources() {
        if source.path == file_of_this_rule() {
            continue;
        }
        findings.extend(
            source
                .lines()
                .filter(|(_, line)| private.iter().any(|path| line.contains(path)))
                .map(|(number, line)| format!("{}:{number}: {}", source.path, line.trim())),
        );
    }
    expect_none("paths of one machine", &findings);
}

#[test]
fn nothing_is_left_for_later_without_a_name() {
    let markers = ["TODO", "FIXME", "XXX", "HACK", "todo!(", "unimplemented!("];
    let mut findings = Vec::new();
    for source in sources() {
        if source.path == file_of_this_rule() || source.path == "Cargo.lock" {
            continue;
        }
        findings.extend(
            source
                .lines()
                .filter(|(_, line)| markers.iter().any(|marker| line.contains(marker)))
                .map(|(number, line)| format!("{}:{number}: {}", source.path, line.trim())),
        );
    }
    expect_none("leftover markers", &findings);
}

/// This file spells out what it forbids.
fn file_of_this_rule() -> &'static str {
    "tools/tidy/tests/house_rules.rs"
}

#[test]
fn unsafe_code_is_allowed_in_three_crates_and_forbidden_in_all_others() {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| source.is_rust()) {
        if source
            .crate_folder()
            .is_some_and(|folder| UNSAFE.contains(&folder))
        {
            continue;
        }
        let root = source.path.ends_with("src/lib.rs") || source.path.ends_with("src/main.rs");
        if root && !source.text.contains("#![forbid(unsafe_code)]") {
            findings.push(format!("{} does not forbid unsafe code", source.path));
        }
        let lifted = [
            "expect(unsafe_code",
            "allow(unsafe_code",
            "expect(\n    unsafe_code",
        ];
        if source.path != file_of_this_rule()
            && lifted.iter().any(|text| source.text.contains(text))
        {
            findings.push(format!("{} lifts the lint", source.path));
        }
    }
    expect_none("unsafe code outside os, ring and latency", &findings);
}

#[test]
fn atomics_and_cells_of_modelled_crates_come_from_sync() {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| source.is_rust()) {
        let modelled = source
            .crate_folder()
            .is_some_and(|folder| MODELLED.contains(&folder));
        let mapped = MAPPED_WORDS.contains(&source.path.as_str());
        if !modelled || mapped || source.path.contains("/tests/") {
            continue;
        }
        let direct = |line: &str| {
            let line = line.replace("teeline_sync::", "");
            ["sync::atomic", "cell::UnsafeCell"]
                .iter()
                .any(|name| line.contains(name))
        };
        findings.extend(
            source
                .lines()
                .filter(|(_, line)| direct(line))
                .map(|(number, line)| format!("{}:{number}: {}", source.path, line.trim())),
        );
    }
    expect_none("atomics and cells that loom does not see", &findings);
}

/// A format is kept by golden files: `ring.v1.hex` is one of `ring.md`, and a document may name others of its crate. Where
/// the format is text, a test reads the document instead. A document that has a folder is about what lies in there.
#[test]
fn every_format_document_is_held_by_golden_files_or_read_by_a_test() {
    let sources = sources();
    let documents = sources
        .iter()
        .filter(|source| source.path.starts_with("docs/formats/"));
    let golden: Vec<&str> = sources
        .iter()
        .filter(|source| source.path.contains("/tests/golden/"))
        .map(|source| file_name(&source.path))
        .collect();
    let holds = |document: &Source, golden: &str| {
        let stem = file_name(&document.path).trim_end_matches(".md");
        let version = golden.strip_prefix(stem).unwrap_or_default();
        version.starts_with(['.', '-']) || document.text.contains(golden)
    };
    let read_by_a_test = |document: &Source| {
        sources.iter().any(|source| {
            source.path.contains("/tests/")
                && source.text.contains("include_str!")
                && source.text.contains(&document.path)
        })
    };
    let mut findings = Vec::new();
    let mut held = BTreeSet::new();
    for document in documents {
        let own: Vec<&str> = golden
            .iter()
            .copied()
            .filter(|golden| holds(document, golden))
            .collect();
        let folder = root().join(document.path.trim_end_matches(".md"));
        if own.is_empty() && !read_by_a_test(document) && !folder.is_dir() {
            findings.push(format!("{} has no golden file", document.path));
        }
        held.extend(own);
    }
    let unheld = golden.iter().filter(|golden| !held.contains(**golden));
    findings.extend(unheld.map(|golden| format!("{golden} belongs to no format document")));
    expect_none("formats", &findings);
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Prints who answers which row: `cargo test -p teeline-tidy -- --show-output`.
#[test]
fn every_hazard_of_this_version_is_named_by_a_test() {
    let sources = sources();
    let tests: Vec<&Source> = sources
        .iter()
        .filter(|source| source.is_rust() && source.path.starts_with("crates/"))
        .filter(|source| source.text.contains("#[test]"))
        .collect();
    let mut missing = Vec::new();
    for row in HAZARDS {
        let naming: Vec<&str> = tests
            .iter()
            .filter(|source| {
                source
                    .lines()
                    .any(|(_, line)| line.contains("HAZARDS") && line.contains(row))
            })
            .map(|source| source.path.as_str())
            .collect();
        println!("{row}: {}", naming.join(", "));
        if naming.is_empty() {
            missing.push(row.to_owned());
        }
    }
    expect_none(
        "rows that no test names (`HAZARDS` and the row on one line)",
        &missing,
    );
}

/// A release store and the acquire load that needs it carry the same label: `SYNC frame-commit`.
#[test]
fn every_sync_label_has_its_partner() {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources().iter().filter(|source| source.is_rust()) {
        if source.path == file_of_this_rule() {
            continue;
        }
        for (number, line) in source.lines() {
            let Some((_, label)) = line.split_once("// SYNC ") else {
                continue;
            };
            let label = label.split([':', ' ', ';', ',']).next().unwrap_or_default();
            let place = format!("{}:{number}", source.path);
            places.entry(label.to_owned()).or_default().insert(place);
        }
    }
    let alone: Vec<String> = places
        .iter()
        .filter(|(_, places)| places.len() < 2)
        .map(|(label, places)| format!("{label}: {places:?}"))
        .collect();
    expect_none("SYNC labels that occur once", &alone);
}
