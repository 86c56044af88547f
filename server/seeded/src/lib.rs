//! `getrandom` from a seed, for simulations. No server links this crate.
//!
//! Whatever is random in a program asks the C library in the end: the order of hash maps, which branch a `select!` polls first, election timeouts, ids.
//! None of these can be given a seed each, and most belong to others. The symbol defined here takes the C library's place in the whole program (the
//! standard library looks for it by name to allow just this): a thread that called [`seed_thread`] gets numbers that follow from the seed, every other
//! thread what the kernel gives.
//!
//! A thread asks only once for much of this, when it first needs it. So a run that is to be repeated begins on a new thread, with the seed.

use std::cell::Cell;

use libc::{c_uint, c_void, size_t, ssize_t};

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// From here on what is random on this thread follows from `seed`.
pub fn seed_thread(seed: u64) {
    STATE.set(Some(seed));
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Fills a buffer with what is random, as the C library's function does.
///
/// # Safety
///
/// As there: `buffer` has room for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut c_void, bytes: size_t, flags: c_uint) -> ssize_t {
    // At a thread's very end there is no state any more.
    let Some(mut state) = STATE.try_with(Cell::get).ok().flatten() else {
        // SAFETY: the kernel checks all three arguments.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, bytes, flags) } as ssize_t;
    };
    for at in (0..bytes).step_by(8) {
        let number = next(&mut state).to_le_bytes();
        let count = (bytes - at).min(8);
        // SAFETY: the caller says that there is room for `bytes`, and `at + count` is no more.
        unsafe {
            std::ptr::copy_nonoverlapping(number.as_ptr(), buffer.cast::<u8>().add(at), count);
        }
    }
    STATE.set(Some(state));
    bytes as ssize_t
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    /// Of a new thread: the order of a hash map's keys, and a number.
    fn drawn(seed: Option<u64>) -> (Vec<u32>, u64) {
        let drawing = std::thread::spawn(move || {
            if let Some(seed) = seed {
                super::seed_thread(seed);
            }
            let keys: HashSet<u32> = (0..100).collect();
            (keys.into_iter().collect(), rand::random())
        });
        drawing.join().unwrap()
    }

    #[test]
    fn what_is_random_follows_from_the_seed_and_only_where_one_was_given() {
        assert_eq!(drawn(Some(7)), drawn(Some(7)));
        let (order, number) = drawn(Some(7));
        let (other_order, other_number) = drawn(Some(8));
        assert_ne!(order, other_order);
        assert_ne!(number, other_number);
        assert_ne!(drawn(None), drawn(None));
    }
}
