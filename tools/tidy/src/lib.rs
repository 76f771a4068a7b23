//! What the house rules (`tests/house_rules.rs`) look at: the files of the workspace, its packages, and who depends on
//! whom. Everything panics where it cannot go on, since it serves tests only.
#![forbid(unsafe_code)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Folders that hold no source: build output and version control.
const NOT_SOURCE: [&str; 2] = ["target", ".git"];

/// The root of the workspace.
///
/// # Panics
/// When this package was moved, or the test is not run by cargo.
#[must_use]
pub fn root() -> PathBuf {
    // Asked when it runs: clones that share a build folder share the program.
    let here = env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the package is");
    let here = Path::new(&here);
    let root = here
        .ancestors()
        .nth(2)
        .expect("tools/tidy is two levels down");
    assert!(
        root.join("Cargo.lock").is_file(),
        "{} is no root",
        root.display()
    );
    root.to_owned()
}

/// A text file of the workspace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Path from the root, with `/`.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl Source {
    /// Whether the file is written in Rust.
    #[must_use]
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The folder below `crates/` that holds the file, if one does.
    #[must_use]
    pub fn crate_folder(&self) -> Option<&str> {
        self.path.strip_prefix("crates/")?.split('/').next()
    }

    /// Every line with its number from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }
}

/// Reads one file that has to exist.
///
/// # Panics
/// When it does not.
#[must_use]
pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All text files of the workspace, sorted by path. Binary files and build output are left out.
///
/// # Panics
/// When a folder cannot be read.
#[must_use]
pub fn sources() -> Vec<Source> {
    let root = root();
    let mut folders = vec![root.clone()];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("the folder was opened").path()) {
            let skipped = path
                .file_name()
                .is_some_and(|name| NOT_SOURCE.iter().any(|skipped| name == *skipped));
            if skipped {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let path = path
                    .strip_prefix(&root)
                    .expect("it was found below the root");
                let path = path.to_string_lossy().into_owned();
                sources.push(Source { path, text });
            }
        }
    }
    sources.sort();
    sources
}

/// A package of the workspace and what it names.
#[derive(Debug)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// What it needs to be built, tests included, without itself.
    pub needs: Vec<String>,
    /// The packages from outside that it names, tests included.
    pub outside: Vec<String>,
}

/// The packages of the workspace, as `cargo metadata` lists them.
///
/// # Panics
/// When cargo fails.
#[must_use]
pub fn packages() -> Vec<Package> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs this test");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {errors}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let text = |value: &Value| value.as_str().expect("names are texts").to_owned();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    list(&metadata["packages"])
        .iter()
        .map(|package| {
            let name = text(&package["name"]);
            let (inside, outside): (Vec<_>, Vec<_>) = list(&package["dependencies"])
                .into_iter()
                .partition(|dependency| dependency["path"].is_string());
            let names = |dependencies: Vec<Value>| {
                dependencies
                    .iter()
                    .map(|dependency| text(&dependency["name"]))
                    .filter(|needed| *needed != name)
                    .collect()
            };
            let (needs, outside) = (names(inside), names(outside));
            Package {
                name,
                needs,
                outside,
            }
        })
        .collect()
}
