//! The bridge on a real ring and a real log, by its public API.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod blocked;
mod feeds;
mod flow;
mod growth;
mod kills;
mod lives;
mod place;
mod relayed;
mod routes;
mod running;
