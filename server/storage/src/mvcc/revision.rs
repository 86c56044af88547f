//! The clock of the key space: (main, sub), and its 17 order-preserving bytes.
//!
//!     | main: u64 BE | '_' | sub: u64 BE | 't' if a tombstone |
//!
//! etcd: server/storage/mvcc/revision.go.

/// One write: `main` counts transactions that wrote, `sub` the writes within one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision {
    pub main: i64,
    pub sub: i64,
}

/// Bytes of a revision without the tombstone mark.
pub const REVISION_BYTES: usize = 17;

impl Revision {
    pub const fn new(main: i64, sub: i64) -> Self {
        Self { main, sub }
    }

    pub fn to_bytes(self) -> [u8; REVISION_BYTES] {
        let mut out = [b'_'; REVISION_BYTES];
        out[..8].copy_from_slice(&self.main.to_be_bytes());
        out[9..].copy_from_slice(&self.sub.to_be_bytes());
        out
    }

    /// Reads 17 bytes, or 18 with the tombstone mark; None when they are no revision.
    pub fn from_bytes(bytes: &[u8]) -> Option<(Self, bool)> {
        let tombstone = match bytes.len() {
            REVISION_BYTES => false,
            n if n == REVISION_BYTES + 1 && bytes[REVISION_BYTES] == b't' => true,
            _ => return None,
        };
        if bytes[8] != b'_' {
            return None;
        }
        let main = i64::from_be_bytes(bytes[..8].try_into().ok()?);
        let sub = i64::from_be_bytes(bytes[9..REVISION_BYTES].try_into().ok()?);
        Some((Self { main, sub }, tombstone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_keep_the_order_and_come_back() {
        let mut last = Vec::new();
        for (main, sub) in [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 255),
            (1, 256),
            (256, 0),
            (i64::MAX, 3),
        ] {
            let bytes = Revision::new(main, sub).to_bytes().to_vec();
            assert!(bytes > last, "{main}_{sub}");
            assert_eq!(
                Revision::from_bytes(&bytes),
                Some((Revision::new(main, sub), false))
            );
            let mut tombstone = bytes.clone();
            tombstone.push(b't');
            assert_eq!(
                Revision::from_bytes(&tombstone),
                Some((Revision::new(main, sub), true))
            );
            last = bytes;
        }
        assert_eq!(Revision::from_bytes(b"short"), None);
    }
}
