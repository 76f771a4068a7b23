//! Messages that are set aside: tried again after a while, and given up in the end, without ever being in doubt.
//!
//! With a [`Retry`] policy, a [`Delivery`](crate::mode::Delivery) does not stop at a message that its handler refuses. The
//! message is *parked*: stored in the consumer's database, in the transaction that moves the offset, and tried again when
//! its backoff is over. A message that is given up is a *dead letter*. That is decided once, on record, before anything else:
//! a unique row with a number; then the dead letter is stored in the topic `<topic>.<group>.dlq`, durably and under that
//! number, with origin, attempts and error; and only then does the offset move. Whoever is killed in between finds the row
//! and completes what was decided.
//!
//! Somebody then looks ([`DeadLetters`], `teeline dlq`), and *redrives* the message or *drops* it. Both go through the topic
//! `<topic>.<group>.retry`, which only this group reads; a message that went back into its topic would count twice with
//! every other group. Until then the [list of what is set aside](crate::mode::Delivery::set_aside) says that the state is
//! incomplete.
//!
//! [`Order::PerKey`] keeps messages of a key in order: those behind a message that is set aside wait for it.

mod copied;
mod id;
mod letters;
mod list;
mod policy;
pub(crate) mod table;
mod topics;

pub use copied::Origin;
pub(crate) use copied::{Copied, Order as Ordered, order_of};
pub use id::{LetterId, NoLetterId};
pub(crate) use letters::{Letters, Obituary};
pub use list::{DeadLetter, DeadLetters, Fate};
pub use policy::{Backoff, Order, Retry, RetryPolicy};
pub use table::{SetAside, State, TABLES};
pub use topics::DeadLetterError;
