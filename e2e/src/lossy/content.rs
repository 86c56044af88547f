//! The bytes of one file, twice: as programs see them, and as the disk will have them after a power cut.
//!
//! Pages are shared between the two until one is written again, so that a preallocated log costs nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::StdRng;

pub(super) const SECTOR: usize = 512;
pub(super) const PAGE: usize = 4096;
const SECTORS_PER_PAGE: usize = PAGE / SECTOR;

type Page = Arc<[u8; PAGE]>;

/// Bytes with a length; pages that are not there read as zeros.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    pub(super) len: u64,
    pages: BTreeMap<u64, Page>,
    /// Blocks up to here are taken, written or not.
    reserved: u64,
    /// Pages that lie behind `reserved`.
    beyond: u64,
}

impl Content {
    /// Bytes of blocks it takes.
    pub(super) fn allocated(&self) -> u64 {
        self.reserved + self.beyond * PAGE as u64
    }

    fn recount(&mut self) {
        let first = self.reserved.div_ceil(PAGE as u64);
        self.beyond = self.pages.range(first..).count() as u64;
    }

    pub(super) fn read(&self, offset: u64, size: usize) -> Vec<u8> {
        let end = (offset + size as u64).min(self.len);
        let mut out = Vec::with_capacity(size.min(1 << 20));
        let mut at = offset;
        while at < end {
            let (page, within) = split(at);
            let count = (PAGE - within).min((end - at) as usize);
            match self.pages.get(&page) {
                Some(bytes) => out.extend_from_slice(&bytes[within..within + count]),
                None => out.resize(out.len() + count, 0),
            }
            at += count as u64;
        }
        out
    }

    /// Bytes of new blocks that a write there needs.
    fn needs(&self, offset: u64, size: usize) -> u64 {
        let (first, end) = pages_of(offset, size);
        let reserved = self.reserved.div_ceil(PAGE as u64);
        let new = (first.max(reserved)..end.max(reserved))
            .filter(|page| !self.pages.contains_key(page))
            .count();
        (new * PAGE) as u64
    }

    fn page(&mut self, page: u64) -> &mut [u8; PAGE] {
        let reserved = self.reserved.div_ceil(PAGE as u64);
        let beyond = &mut self.beyond;
        let bytes = self.pages.entry(page).or_insert_with(|| {
            *beyond += u64::from(page >= reserved);
            Arc::new([0; PAGE])
        });
        Arc::make_mut(bytes)
    }

    fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.pages.split_off(&len.div_ceil(PAGE as u64));
            let (page, within) = split(len);
            if within > 0 && self.pages.contains_key(&page) {
                self.page(page)[within..].fill(0);
            }
            self.reserved = self.reserved.min(len.next_multiple_of(PAGE as u64));
            self.recount();
        }
        self.len = len;
    }
}

fn split(at: u64) -> (u64, usize) {
    (at / PAGE as u64, (at % PAGE as u64) as usize)
}

/// First page, and the one behind the last.
fn pages_of(offset: u64, size: usize) -> (u64, u64) {
    let end = offset + size as u64;
    (offset / PAGE as u64, end.div_ceil(PAGE as u64))
}

/// Sectors by page, a bit each.
type Sectors = BTreeMap<u64, u8>;

/// A file: what programs see, what is on the disk, and which sectors differ.
#[derive(Clone, Debug, Default)]
pub(super) struct File {
    pub(super) live: Content,
    durable: Content,
    dirty: Sectors,
    /// Sectors whose sync failed: as with a kernel, which then counts them as clean, no later sync writes them.
    forgotten: Sectors,
}

/// What a power cut did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Losses {
    pub sectors_kept: u64,
    pub sectors_dropped: u64,
    pub sectors_torn: u64,
    pub names_kept: u64,
    pub names_dropped: u64,
}

/// How likely an unsynced sector is there after the cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mood {
    pub(super) keep: f64,
    pub(super) tear: f64,
}

impl File {
    pub(super) fn dirty_sectors(&self) -> u64 {
        let count = |sectors: &Sectors| sectors.values().map(|m| u64::from(m.count_ones())).sum();
        let (dirty, forgotten): (u64, u64) = (count(&self.dirty), count(&self.forgotten));
        dirty + forgotten
    }

    /// Bytes of new blocks that a write there needs.
    pub(super) fn needs(&self, offset: u64, size: usize) -> u64 {
        self.live.needs(offset, size)
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let (page, within) = split(at);
            let (now, later) = rest.split_at((PAGE - within).min(rest.len()));
            self.live.page(page)[within..within + now.len()].copy_from_slice(now);
            let mut mask = 0;
            for sector in within / SECTOR..(within + now.len()).div_ceil(SECTOR) {
                mask |= 1 << sector;
            }
            self.touch(page, mask);
            at += now.len() as u64;
            rest = later;
        }
        self.live.len = self.live.len.max(at);
    }

    fn touch(&mut self, page: u64, mask: u8) {
        *self.dirty.entry(page).or_default() |= mask;
        if let Some(forgotten) = self.forgotten.get_mut(&page) {
            *forgotten &= !mask;
        }
    }

    pub(super) fn set_len(&mut self, len: u64) {
        if len < self.live.len {
            let first = len / PAGE as u64;
            let pages: Vec<u64> = self
                .live
                .pages
                .range(first..)
                .map(|(&page, _)| page)
                .collect();
            for page in pages {
                self.touch(page, u8::MAX);
            }
        }
        self.live.set_len(len);
    }

    /// Bytes of new blocks for a reservation up to `end`.
    pub(super) fn reserve_needs(&self, end: u64) -> u64 {
        let end = end.next_multiple_of(PAGE as u64);
        if end <= self.live.reserved {
            return 0;
        }
        let first = self.live.reserved.div_ceil(PAGE as u64);
        let there = self.live.pages.range(first..end / PAGE as u64).count();
        end - self.live.reserved - (there * PAGE) as u64
    }

    pub(super) fn reserve(&mut self, end: u64, keep_len: bool) {
        self.live.reserved = self.live.reserved.max(end.next_multiple_of(PAGE as u64));
        self.live.recount();
        if !keep_len {
            self.live.len = self.live.len.max(end);
        }
    }

    /// What is dirty is on the disk now, length and reservation too.
    pub(super) fn sync(&mut self) {
        self.durable.set_len(self.durable.len.min(self.live.len));
        for (page, mask) in std::mem::take(&mut self.dirty) {
            let kept = self.forgotten.get(&page).copied().unwrap_or_default();
            match self.live.pages.get(&page) {
                // Sharing the page would write its forgotten sectors too.
                Some(live) if kept == 0 => {
                    self.durable.pages.insert(page, Arc::clone(live));
                }
                Some(live) => {
                    let live = Arc::clone(live);
                    let durable = self.durable.page(page);
                    for sector in sectors(mask) {
                        durable[sector.clone()].copy_from_slice(&live[sector]);
                    }
                }
                None => drop(self.durable.pages.remove(&page)),
            }
        }
        self.durable.len = self.live.len;
        self.durable.reserved = self.live.reserved;
        self.durable.recount();
    }

    /// The sync failed: what was dirty is never written, unless a program writes it again.
    pub(super) fn forget(&mut self) {
        for (page, mask) in std::mem::take(&mut self.dirty) {
            *self.forgotten.entry(page).or_default() |= mask;
        }
    }

    /// Turns a bit over, on the disk and in what programs see.
    pub(super) fn flip(&mut self, offset: u64, bit: u8) {
        let (page, within) = split(offset);
        for content in [&mut self.live, &mut self.durable] {
            if offset < content.len {
                content.page(page)[within] ^= 1 << (bit % 8);
            }
        }
    }

    /// The power is gone: what was not synced is there, or not, or torn, sector by sector.
    pub(super) fn cut(&mut self, mood: Mood, random: &mut StdRng, losses: &mut Losses) {
        let mut content = std::mem::take(&mut self.durable);
        let live = std::mem::take(&mut self.live);
        // A length may reach the disk before the bytes do.
        if live.len != content.len && random.random_bool(mood.keep) {
            content.set_len(live.len);
            content.reserved = live.reserved;
            content.recount();
        }
        let mut unsynced = std::mem::take(&mut self.dirty);
        for (page, mask) in std::mem::take(&mut self.forgotten) {
            *unsynced.entry(page).or_default() |= mask;
        }
        for (page, mask) in unsynced {
            if page * PAGE as u64 >= content.len {
                losses.sectors_dropped += u64::from(mask.count_ones());
                continue;
            }
            let zeros = Arc::new([0; PAGE]);
            let new = live.pages.get(&page).unwrap_or(&zeros);
            for sector in sectors(mask) {
                if random.random_bool(mood.tear) {
                    let torn = sector.start + random.random_range(1..SECTOR);
                    content.page(page)[sector.start..torn]
                        .copy_from_slice(&new[sector.start..torn]);
                    losses.sectors_torn += 1;
                } else if random.random_bool(mood.keep) {
                    content.page(page)[sector.clone()].copy_from_slice(&new[sector]);
                    losses.sectors_kept += 1;
                } else {
                    losses.sectors_dropped += 1;
                }
            }
        }
        let len = content.len;
        let (page, within) = split(len);
        if within > 0 && content.pages.contains_key(&page) {
            content.page(page)[within..].fill(0);
        }
        self.durable = content.clone();
        self.live = content;
    }
}

fn sectors(mask: u8) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..SECTORS_PER_PAGE)
        .filter(move |sector| mask & (1 << sector) != 0)
        .map(|sector| sector * SECTOR..(sector + 1) * SECTOR)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    const DROP: Mood = Mood {
        keep: 0.0,
        tear: 0.0,
    };
    const KEEP: Mood = Mood {
        keep: 1.0,
        tear: 0.0,
    };

    fn cut(file: &mut File, mood: Mood) -> Losses {
        let mut losses = Losses::default();
        file.cut(mood, &mut StdRng::seed_from_u64(1), &mut losses);
        losses
    }

    #[test]
    fn synced_bytes_stay_and_others_go() {
        let mut file = File::default();
        file.write(0, &[1; 10_000]);
        file.sync();
        file.write(600, &[2; 100]);
        file.write(20_000, &[3; 10]);
        assert_eq!(file.live.len, 20_010);
        let losses = cut(&mut file, DROP);
        assert_eq!((losses.sectors_dropped, losses.sectors_kept), (2, 0));
        assert_eq!(file.live.read(0, 99_999), vec![1; 10_000]);
    }

    #[test]
    fn what_the_disk_kept_by_chance_is_there() {
        let mut file = File::default();
        file.write(5_000, b"abc");
        cut(&mut file, KEEP);
        assert_eq!(file.live.read(5_000, 10), b"abc");
        assert_eq!(file.live.len, 5_003);
    }

    #[test]
    fn a_torn_sector_is_new_in_front_and_old_behind() {
        let mut file = File::default();
        file.write(0, &[1; SECTOR]);
        file.sync();
        file.write(0, &[2; SECTOR]);
        let losses = cut(
            &mut file,
            Mood {
                keep: 0.0,
                tear: 1.0,
            },
        );
        assert_eq!(losses.sectors_torn, 1);
        let bytes = file.live.read(0, SECTOR);
        let new = bytes.iter().take_while(|&&byte| byte == 2).count();
        assert!((1..SECTOR).contains(&new));
        assert!(bytes[new..].iter().all(|&byte| byte == 1));
    }

    #[test]
    fn a_failed_sync_forgets_for_good_unless_it_is_written_again() {
        let mut file = File::default();
        file.write(0, &[1; 2 * SECTOR]);
        file.forget();
        file.write(0, &[2; SECTOR]);
        file.sync();
        assert_eq!(file.dirty_sectors(), 1);
        cut(&mut file, DROP);
        assert_eq!(file.live.read(0, SECTOR), vec![2; SECTOR]);
        assert_eq!(file.live.read(SECTOR as u64, SECTOR), vec![0; SECTOR]);
    }

    #[test]
    fn cutting_a_file_short_is_as_unsynced_as_writing_it() {
        let mut file = File::default();
        file.write(0, &[1; 3 * PAGE]);
        file.sync();
        file.set_len(100);
        file.set_len(3 * PAGE as u64);
        assert_eq!(file.live.read(99, 2), [1, 0]);
        let mut later = file.clone();
        cut(&mut file, DROP);
        assert_eq!(file.live.read(0, 3 * PAGE), vec![1; 3 * PAGE]);
        later.sync();
        cut(&mut later, DROP);
        assert_eq!(later.live.read(99, 2), [1, 0]);
        assert_eq!(later.live.len, 3 * PAGE as u64);
    }

    #[test]
    fn blocks_are_counted_once_reserved_or_written() {
        let mut file = File::default();
        assert_eq!(file.reserve_needs(10_000), 12_288);
        file.reserve(10_000, false);
        assert_eq!(file.live.allocated(), 12_288);
        assert_eq!(file.needs(0, 12_288), 0);
        assert_eq!(file.needs(12_000, 1_000), 4_096);
        file.write(12_000, &[1; 1_000]);
        assert_eq!(file.live.allocated(), 16_384);
        file.set_len(5);
        assert_eq!(file.live.allocated(), 4_096);
    }
}
