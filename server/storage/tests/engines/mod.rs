//! Runs a test on each engine: `name` takes a `Kind` and becomes `redb::name` and `sled::name`.

#[macro_export]
macro_rules! on_each_engine {
    ($($test:ident),* $(,)?) => {
        mod redb {
            $(#[test] fn $test() { super::$test(super::Kind::Redb); })*
        }
        mod sled {
            $(#[test] fn $test() { super::$test(super::Kind::Sled); })*
        }
    };
}
