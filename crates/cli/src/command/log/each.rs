//! What a verb does for many topics and partitions: what fails in one keeps it from none of the others.

use std::fmt::Display;

use teeline_core::Name;
use teeline_log::{Log, Topic, TopicError};

use super::change;
use crate::output::{Answer, Failure, complain};

/// Tells at once what fails, and goes on.
#[derive(Debug, Default)]
pub(super) struct Each {
    failed: bool,
}

impl Each {
    /// What was done; `None` if it failed.
    pub(super) fn done<T>(&mut self, done: Result<T, impl Display>) -> Option<T> {
        done.inspect_err(|error| {
            self.failed = true;
            complain(error);
        })
        .ok()
    }

    /// The topic of that name, or all that can be opened.
    pub(super) fn topics(&mut self, log: &Log, name: Option<&Name>) -> Result<Vec<Topic>, Failure> {
        if let Some(name) = name {
            return Ok(vec![change::topic(log, name)?]);
        }
        let mut topics = Vec::new();
        for name in log.topic_names().map_err(Failure::new)? {
            match log.topic(&name) {
                // A directory of the log itself, or somebody else's.
                Err(TopicError::NotFound(_)) => {}
                opened => topics.extend(self.done(opened)),
            }
        }
        Ok(topics)
    }

    /// How the verb ends, if nothing failed.
    pub(super) fn end(self, answer: Answer) -> Result<Answer, Failure> {
        match self.failed {
            false => Ok(answer),
            true => Err(Failure::Told),
        }
    }
}
