//! URLs as etcd's flags take them: kept as written, since ids are derived from the text.
//!
//! etcd: client/pkg/types/urls.go.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

/// A listen or advertise URL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Url {
    text: String,
    pub scheme: Scheme,
    /// `host:port`, or a path for a socket.
    pub address: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scheme {
    Http,
    Https,
    Unix,
    Unixs,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Host as written; a name is only ever "localhost".
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

impl Url {
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let bad_scheme = || format!("URL scheme must be http, https, unix, or unixs: {text}");
        let (scheme, address) = text.split_once("://").ok_or_else(bad_scheme)?;
        let scheme = match scheme {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            "unix" => Scheme::Unix,
            "unixs" => Scheme::Unixs,
            _ => return Err(bad_scheme()),
        };
        let url = Self {
            text: text.to_owned(),
            scheme,
            address: address.to_owned(),
        };
        if matches!(scheme, Scheme::Unix | Scheme::Unixs) {
            return Ok(url);
        }
        if let Some((host, _)) = address.split_once('/') {
            split_host_port(host).ok_or_else(|| {
                format!("URL address does not have the form \"host:port\": {text}")
            })?;
            return Err(format!("URL must not contain a path: {text}"));
        }
        split_host_port(address)
            .ok_or_else(|| format!("URL address does not have the form \"host:port\": {text}"))?;
        Ok(url)
    }

    /// Comma-separated; sorted, as etcd keeps them. An empty text is no URL.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, String> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let mut urls = text
            .split(',')
            .map(Url::parse)
            .collect::<Result<Vec<_>, _>>()?;
        urls.sort();
        Ok(urls)
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Where to bind; names other than localhost are refused, as etcd refuses them.
    pub fn endpoint(&self) -> Result<Endpoint, String> {
        if matches!(self.scheme, Scheme::Unix | Scheme::Unixs) {
            return Ok(Endpoint::Unix(PathBuf::from(&self.address)));
        }
        let no_port = || format!("URL address does not have the form \"host:port\": {self}");
        let (host, port) = split_host_port(&self.address).ok_or_else(no_port)?;
        if host != "localhost" && host.parse::<IpAddr>().is_err() {
            return Err(format!("expected IP in URL for binding ({self})"));
        }
        Ok(Endpoint::Tcp {
            host: host.to_owned(),
            port,
        })
    }

    /// True when what goes through it is encrypted.
    pub fn is_secure(&self) -> bool {
        matches!(self.scheme, Scheme::Https | Scheme::Unixs)
    }

    /// The host to connect to, None for a socket.
    pub fn host(&self) -> Option<&str> {
        match self.scheme {
            Scheme::Http | Scheme::Https => split_host_port(&self.address).map(|(host, _)| host),
            Scheme::Unix | Scheme::Unixs => None,
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// `host:port` or `[v6]:port`; brackets are taken off.
fn split_host_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    Some((host, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_url_and_what_is_not() {
        for (text, expected) in [
            ("http://127.0.0.1:2379", None),
            ("http://[::1]:2379", None),
            ("http://localhost:2379", None),
            ("unix:///run/t/s.sock", None),
            (
                "http://h:1/path",
                Some("URL must not contain a path: http://h:1/path"),
            ),
            (
                "ftp://h:1",
                Some("URL scheme must be http, https, unix, or unixs: ftp://h:1"),
            ),
            (
                "127.0.0.1:1",
                Some("URL scheme must be http, https, unix, or unixs: 127.0.0.1:1"),
            ),
            (
                "http://h",
                Some("URL address does not have the form \"host:port\": http://h"),
            ),
        ] {
            assert_eq!(Url::parse(text).err().as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn only_addresses_and_localhost_are_bound() {
        let endpoint = |text| Url::parse(text).unwrap().endpoint();
        assert_eq!(
            endpoint("http://[::1]:2379"),
            Ok(Endpoint::Tcp {
                host: "::1".to_owned(),
                port: 2379
            })
        );
        assert_eq!(endpoint("unix:///a/b"), Ok(Endpoint::Unix("/a/b".into())));
        assert_eq!(
            endpoint("http://example.com:1"),
            Err("expected IP in URL for binding (http://example.com:1)".to_owned())
        );
    }

    #[test]
    fn a_list_is_sorted_and_keeps_its_texts() {
        let urls = Url::parse_list("http://b:2, http://a:1").unwrap();
        let texts: Vec<&str> = urls.iter().map(Url::as_str).collect();
        assert_eq!(texts, ["http://a:1", "http://b:2"]);
    }
}
