//! Kubernetes quantities as bytes, and bytes as something people read.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A quantity that is not a whole number of bytes an int64 can hold.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a size")]
pub struct QuantityError(pub String);

/// The bytes a quantity such as `1.5Gi` means, rounded up as Kubernetes does.
pub fn bytes(quantity: &Quantity) -> Result<i64, QuantityError> {
    let text = quantity.0.trim();
    let fail = || QuantityError(text.to_owned());
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let unit: i128 = match suffix {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => 1_000_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        _ => return Err(fail()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || whole.len() > 18 || fraction.len() > 9 {
        return Err(fail());
    }
    let whole: i128 = whole.parse().map_err(|_| fail())?;
    let scale = 10_i128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let part: i128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().map_err(|_| fail())?
    };
    let total = whole * unit + (part * unit + scale - 1) / scale;
    i64::try_from(total).map_err(|_| fail())
}

/// Bytes with a binary unit and one decimal: `41.3 MiB`.
pub fn human(bytes: i64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut tenths = i128::from(bytes) * 10 / 1024;
    let mut unit = 0;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_kubernetes_reads_them() {
        for (text, want) in [
            ("0", Some(0)),
            ("1024", Some(1024)),
            ("2Gi", Some(2 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("100M", Some(100_000_000)),
            ("0.3", Some(1)),
            ("9000Pi", None),
            ("1m", None),
            ("-1", None),
            (".5Gi", None),
            ("", None),
        ] {
            assert_eq!(bytes(&Quantity(text.into())).ok(), want, "{text}");
        }
    }

    #[test]
    fn people_read_binary_units() {
        assert_eq!(human(512), "512 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(200 << 20), "200.0 MiB");
        assert_eq!(human(8 << 30), "8.0 GiB");
    }
}
