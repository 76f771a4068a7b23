//! Sleeping on words of mappings, until somebody wakes whoever sleeps there or the time is up.

use std::{
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    thread::futex::{self, Timespec, WaitFlags, WaitPtr, WaitvFlags},
    time::ClockId,
};
use teeline_core::time::Clock;

use crate::{Mapping, SystemClock};

/// How many words one sleeper can wait for.
pub const WORDS_MAX: usize = 128;

/// How a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// Somebody woke the sleeper, or a word had changed before it slept.
    Woken,
    /// The time is up.
    TimedOut,
    /// A signal came. One whose handler asks for interrupted calls to go on need not end a sleep on several words.
    Interrupted,
}

/// A word to sleep on while it is zero, or something else: 32 bits of a mapping, or of the process itself. Others may write
/// it at any time.
#[derive(Debug, Clone, Copy)]
pub struct Word<'a> {
    word: &'a AtomicU32,
    unchanged: u32,
}

impl<'a> Word<'a> {
    /// The word at `offset` of a mapping, which may be read-only.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 4 or the word does not lie inside.
    #[must_use]
    pub fn of(mapping: &'a Mapping, offset: usize) -> Self {
        Self::private(mapping.word_u32(offset))
    }

    /// A word that only threads of this process share.
    #[must_use]
    pub const fn private(word: &'a AtomicU32) -> Self {
        Self { word, unchanged: 0 }
    }

    /// To sleep on while it is `value`.
    #[must_use]
    pub const fn while_it_is(mut self, value: u32) -> Self {
        self.unchanged = value;
        self
    }

    /// Whether it is something else now. What was written before it was changed is seen then, if that was a release.
    #[must_use]
    pub fn has_changed(self) -> bool {
        self.word.load(Ordering::Acquire) != self.unchanged
    }

    /// Wakes whoever sleeps on this word, in any process, and returns how many those were.
    ///
    /// # Panics
    /// Never: a wake on an aligned word that exists has no way to fail.
    #[must_use]
    pub fn wake(self) -> usize {
        const EVERYONE: u32 = i32::MAX.cast_unsigned();
        futex::wake(self.word, futex::Flags::empty(), EVERYONE)
            .expect("a wake on a mapped, aligned word has no way to fail")
    }
}

/// Sleeps while all of `words` are as they say, until somebody wakes one of them, at most `limit`. Whoever changes a word
/// and wakes its sleepers afterwards is not missed. After [`Slept::Woken`], look again: a wake says nothing about the words.
///
/// # Panics
/// When there is no word, or more than [`WORDS_MAX`], or more than one where [`can_wait_for_many`] says no.
#[must_use]
pub fn sleep(words: &[Word<'_>], limit: Duration) -> Slept {
    let slept = match words {
        [word] => futex::wait(
            word.word,
            futex::Flags::empty(),
            word.unchanged,
            Some(&timespec(limit)),
        ),
        words => wait_for_many(words, limit).map(drop),
    };
    match slept {
        Err(Errno::TIMEDOUT) => Slept::TimedOut,
        Err(Errno::INTR) => Slept::Interrupted,
        // What an old kernel or a sandbox does not know is asked for once, not here.
        Ok(()) | Err(_) => Slept::Woken,
    }
}

/// Whether the kernel lets a sleeper wait for several words: from Linux 5.16 on, if no sandbox forbids it.
#[must_use]
pub fn can_wait_for_many() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        // One of them is not zero, so nobody sleeps.
        let (zero, one) = (AtomicU32::new(0), AtomicU32::new(1));
        let words = [Word::private(&zero), Word::private(&one)];
        wait_for_many(&words, Duration::ZERO) == Err(Errno::AGAIN)
    })
}

fn wait_for_many(words: &[Word<'_>], limit: Duration) -> Result<usize, Errno> {
    assert!(
        (1..=WORDS_MAX).contains(&words.len()),
        "a sleeper waits for 1 to {WORDS_MAX} words, not {}",
        words.len()
    );
    let mut waits = [futex::Wait::new(); WORDS_MAX];
    for (wait, word) in waits.iter_mut().zip(words) {
        wait.val = word.unchanged.into();
        wait.uaddr = WaitPtr::new(ptr::from_ref(word.word).cast_mut().cast());
        wait.flags = WaitFlags::SIZE_U32;
    }
    let waits = &waits[..words.len()];
    // Unlike that for one word, this call takes the time at which to give up.
    let until = Duration::from_nanos(SystemClock.monotonic_ns()).saturating_add(limit);
    futex::waitv(
        waits,
        WaitvFlags::empty(),
        Some(&timespec(until)),
        ClockId::Monotonic,
    )
}

/// A time too long for the kernel's type is as good as for ever.
fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::file;

    /// A page mapped for writing, and read-only.
    fn page(dir: &tempfile::TempDir, name: &str) -> (Mapping, Mapping) {
        let path = dir.path().join(name);
        let file = file::create_new(&path, 0o600, None).unwrap();
        file::reserve(&file, &path, 4096).unwrap();
        let writable = Mapping::read_write(&file, &path, 4096).unwrap();
        let read_only = Mapping::read_only(&file::open_read(&path).unwrap(), &path, 4096).unwrap();
        (writable, read_only)
    }

    /// The kernel's own answer, for tests of what needs it.
    fn sizes() -> impl Iterator<Item = usize> {
        let many = can_wait_for_many();
        if !many {
            println!("skipped: sleeping on several words (the kernel or a sandbox refuses it)");
        }
        [1, 2, WORDS_MAX]
            .into_iter()
            .filter(move |count| *count == 1 || many)
    }

    #[test]
    fn a_sleeper_on_read_only_mappings_is_woken_by_whoever_writes_any_of_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let (writable, read_only) = page(&dir, "page");
        for count in sizes() {
            for woken in [0, count / 2, count - 1] {
                let words: Vec<_> = (0..count).map(|at| Word::of(&read_only, 8 * at)).collect();
                thread::scope(|scope| {
                    scope.spawn(|| {
                        writable.store_u64(8 * woken, 1, Ordering::Release);
                        let _sleepers = Word::of(&writable, 8 * woken).wake();
                    });
                    while read_only.load_u64(8 * woken, Ordering::Acquire) == 0 {
                        let slept = sleep(&words, Duration::from_secs(600));
                        assert_ne!(slept, Slept::TimedOut);
                    }
                });
                let changed_before = sleep(&words, Duration::from_secs(600));
                assert_eq!(changed_before, Slept::Woken);
                writable.store_u64(8 * woken, 0, Ordering::Release);
            }
        }
    }

    #[test]
    fn a_wake_counts_who_slept_on_the_word_and_time_runs_out_for_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let (writable, read_only) = page(&dir, "page");
        for count in sizes() {
            let words: Vec<_> = (0..count).map(|at| Word::of(&read_only, 8 * at)).collect();
            let last = Word::of(&writable, 8 * (count - 1));
            let in_vain = sleep(&words, Duration::from_millis(1));
            assert_eq!(in_vain, Slept::TimedOut);
            assert_eq!(last.wake(), 0, "nobody sleeps any more");
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| sleep(&words, Duration::from_secs(600)));
                while last.wake() == 0 {
                    thread::yield_now();
                }
                assert_eq!(sleeper.join().unwrap(), Slept::Woken);
            });
        }
    }
}
