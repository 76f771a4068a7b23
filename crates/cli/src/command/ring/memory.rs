//! What was asked of a ring's memory and what was granted, as it is printed.

use serde::Serialize;
use teeline_ring::{Grant, MemoryReport};

use crate::output::{Failure, Output};

#[derive(Serialize)]
pub(super) struct MemoryFields {
    asked: String,
    prefault: &'static str,
    lock: &'static str,
    huge_pages: &'static str,
    memory_node: &'static str,
    huge_bytes: u64,
    nodes: Vec<u32>,
    /// What was asked and not granted, each with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<String>,
    #[serde(skip)]
    granted: Vec<&'static str>,
}

impl MemoryFields {
    pub(super) fn new(report: &MemoryReport) -> Self {
        let granted = report.grants().into_iter();
        let granted = granted.filter(|(_, grant)| **grant == Grant::Granted);
        Self {
            asked: report.asked.to_string(),
            prefault: report.prefault.word(),
            lock: report.lock.word(),
            huge_pages: report.huge_pages.word(),
            memory_node: report.node.word(),
            huge_bytes: report.huge_bytes,
            nodes: report.nodes.clone(),
            refused: report
                .refused()
                .map(|(wish, why)| format!("{wish}: {why}"))
                .collect(),
            granted: granted.map(|(wish, _)| wish).collect(),
        }
    }

    pub(super) fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let granted = if self.granted.is_empty() {
            "nothing".to_owned()
        } else {
            self.granted.join(", ")
        };
        out.line(format_args!(
            "memory: asked {}; granted {granted}",
            self.asked
        ))?;
        for refused in &self.refused {
            out.line(format_args!("refused: {refused}"))?;
        }
        Ok(())
    }
}
