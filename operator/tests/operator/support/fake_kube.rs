//! An API server in memory, as far as the operator uses one: names, UIDs, resource versions,
//! generations, finalizers, deletion timestamps, the status subresource, and a log of every write.
//!
//! Server-side apply is a deep merge without ownership, which is all that a single writer can tell
//! apart from the real thing.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::merge;

/// The objects, by collection path and name.
#[derive(Default)]
struct State {
    objects: BTreeMap<(String, String), Value>,
    version: u64,
    writes: Vec<String>,
    refuse: Vec<(String, u16)>,
}

/// The server; clones share its objects.
#[derive(Clone, Default)]
pub(crate) struct FakeKube {
    state: Arc<Mutex<State>>,
}

impl FakeKube {
    /// A client of this server.
    pub(crate) fn client(&self) -> Client {
        let me = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let me = me.clone();
            async move { Ok::<_, Infallible>(me.answer(request).await) }
        });
        Client::new(service, "default")
    }

    /// Puts an object in as somebody else would.
    pub(crate) fn put(&self, collection: &str, object: Value) {
        let mut state = self.state.lock().unwrap();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        state.create(collection, &name, object);
    }

    /// The object as it is.
    pub(crate) fn get(&self, collection: &str, name: &str) -> Option<Value> {
        let key = (collection.to_owned(), name.to_owned());
        self.state.lock().unwrap().objects.get(&key).cloned()
    }

    /// Names in a collection.
    pub(crate) fn names(&self, collection: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state
            .objects
            .keys()
            .filter(|(c, _)| c == collection)
            .map(|(_, n)| n.clone())
            .collect()
    }

    /// Changes an object in place, as a kubelet or a user would.
    pub(crate) fn change(&self, collection: &str, name: &str, change: Value) {
        let mut state = self.state.lock().unwrap();
        let key = (collection.to_owned(), name.to_owned());
        let object = state.objects.get_mut(&key).expect("the object is there");
        if change.get("spec").is_some() {
            let generation = object["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
            object["metadata"]["generation"] = json!(generation);
        }
        merge(object, change);
    }

    /// Deletes as a user would: finalizers hold.
    pub(crate) fn delete(&self, collection: &str, name: &str) {
        self.state.lock().unwrap().delete(collection, name);
    }

    /// Removes an object whatever holds it.
    pub(crate) fn vanish(&self, collection: &str, name: &str) {
        let key = (collection.to_owned(), name.to_owned());
        self.state.lock().unwrap().objects.remove(&key);
    }

    /// From now on writes whose path ends so are answered with this code.
    pub(crate) fn refuse(&self, path_end: &str, code: u16) {
        self.state
            .lock()
            .unwrap()
            .refuse
            .push((path_end.to_owned(), code));
    }

    /// The writes since the last call, as `METHOD path`.
    pub(crate) fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().writes)
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let patch = parts
            .headers
            .get("content-type")
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let mut state = self.state.lock().unwrap();
        if parts.method != Method::GET {
            state.writes.push(format!("{} {path}", parts.method));
            let refusal = state
                .refuse
                .iter()
                .find(|(end, _)| path.ends_with(end.as_str()));
            if let Some((_, code)) = refusal {
                return failure(*code, "the test refuses this");
            }
        }
        let target = Target::parse(&path);
        match (parts.method, target.name.as_deref()) {
            (Method::GET, Some(name)) => found(state.object(&target.collection, name).cloned()),
            (Method::GET, None) => state.list(&target.collection, &query),
            (Method::POST, None) => {
                let name = body["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                if state.object(&target.collection, &name).is_some() {
                    return failure(409, "already exists");
                }
                success(state.create(&target.collection, &name, body))
            }
            (Method::PATCH, Some(name)) => {
                if patch.contains("json-patch") {
                    state.json_patch(&target.collection, name, &body)
                } else {
                    state.merge(&target, name, body, patch.contains("apply"))
                }
            }
            (Method::PUT, Some(name)) => {
                let live = state.object(&target.collection, name);
                let seen = &body["metadata"]["resourceVersion"];
                if live.is_some_and(|l| l["metadata"]["resourceVersion"] != *seen) {
                    return failure(409, "the object has been modified");
                }
                success(state.create(&target.collection, name, body))
            }
            (Method::DELETE, Some(name)) => {
                let Some(live) = state.object(&target.collection, name).cloned() else {
                    return failure(404, "not found");
                };
                let wanted = &body["preconditions"]["uid"];
                if wanted.is_string() && *wanted != live["metadata"]["uid"] {
                    return failure(409, "the UID is another");
                }
                state.delete(&target.collection, name);
                success(live)
            }
            (method, _) => failure(405, &format!("{method} {path} is not served here")),
        }
    }
}

struct Target {
    collection: String,
    name: Option<String>,
    status: bool,
}

impl Target {
    /// `.../namespaces/NS/PLURAL[/NAME[/status]]`; the collection is everything up to PLURAL.
    fn parse(path: &str) -> Self {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let plural = parts
            .iter()
            .position(|p| *p == "namespaces")
            .map_or(parts.len(), |at| at + 3);
        Self {
            collection: parts[..plural.min(parts.len())].join("/"),
            name: parts.get(plural).map(|n| (*n).to_owned()),
            status: parts.get(plural + 1) == Some(&"status"),
        }
    }
}

impl State {
    fn object(&self, collection: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(collection.to_owned(), name.to_owned()))
    }

    fn store(&mut self, collection: &str, name: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects
            .insert((collection.to_owned(), name.to_owned()), object.clone());
        object
    }

    fn create(&mut self, collection: &str, name: &str, mut object: Value) -> Value {
        let version = self.version;
        let meta = &mut object["metadata"];
        for (key, value) in [
            ("uid", json!(format!("uid-{version}-{name}"))),
            ("namespace", json!("default")),
            ("generation", json!(1)),
            ("creationTimestamp", json!("2026-03-01T00:00:00Z")),
        ] {
            if meta[key].is_null() {
                meta[key] = value;
            }
        }
        self.store(collection, name, object)
    }

    fn list(&self, collection: &str, query: &str) -> Response<Body> {
        let query = query.replace("%3D", "=").replace("%2F", "/");
        let selector = query
            .split('&')
            .find_map(|p| p.strip_prefix("labelSelector="));
        let matches = |object: &Value| {
            selector.is_none_or(|s| {
                let (key, value) = s.split_once('=').unwrap_or((s, ""));
                object["metadata"]["labels"][key] == value
            })
        };
        let items: Vec<&Value> = self
            .objects
            .iter()
            .filter(|((c, _), object)| c == collection && matches(object))
            .map(|(_, object)| object)
            .collect();
        let version = self.version.to_string();
        success(json!({
            "apiVersion": "v1",
            "kind": "List",
            "metadata": { "resourceVersion": version },
            "items": items,
        }))
    }

    fn merge(&mut self, target: &Target, name: &str, body: Value, apply: bool) -> Response<Body> {
        let collection = &target.collection;
        let Some(mut object) = self.object(collection, name).cloned() else {
            return if apply && !target.status {
                success(self.create(collection, name, body))
            } else {
                failure(404, "not found")
            };
        };
        if target.status {
            object["status"] = body["status"].clone();
        } else {
            let spec = object["spec"].clone();
            if apply && body["metadata"]["ownerReferences"].is_null() {
                // What the one field manager stops applying is gone.
                let meta = object["metadata"]
                    .as_object_mut()
                    .expect("an object has metadata");
                meta.remove("ownerReferences");
            }
            merge(&mut object, body);
            if object["spec"] != spec {
                let generation = object["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
                object["metadata"]["generation"] = json!(generation);
            }
        }
        success(self.store(collection, name, object))
    }

    /// Only what kube's finalizer helper sends.
    fn json_patch(&mut self, collection: &str, name: &str, patch: &Value) -> Response<Body> {
        let Some(mut object) = self.object(collection, name).cloned() else {
            return failure(404, "not found");
        };
        for operation in patch.as_array().into_iter().flatten() {
            let path = operation["path"].as_str().unwrap_or_default();
            let finalizers = &mut object["metadata"]["finalizers"];
            match (operation["op"].as_str().unwrap_or_default(), path) {
                ("test", _) => {}
                ("add", "/metadata/finalizers") => *finalizers = operation["value"].clone(),
                ("add", _) => {
                    let list = finalizers.as_array_mut().expect("tested by the patch");
                    list.push(operation["value"].clone());
                }
                ("remove", path) => {
                    let at: usize = path.rsplit('/').next().unwrap().parse().unwrap();
                    finalizers.as_array_mut().unwrap().remove(at);
                }
                (op, path) => return failure(400, &format!("{op} {path} is not served here")),
            }
        }
        let held = object["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty());
        if object["metadata"]["deletionTimestamp"].is_string() && !held {
            self.objects
                .remove(&(collection.to_owned(), name.to_owned()));
            return success(object);
        }
        success(self.store(collection, name, object))
    }

    fn delete(&mut self, collection: &str, name: &str) {
        let key = (collection.to_owned(), name.to_owned());
        let Some(object) = self.objects.get_mut(&key) else {
            return;
        };
        let held = object["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty());
        if held {
            let now = ballast_operator::clock::now().0.to_string();
            object["metadata"]["deletionTimestamp"] = json!(now);
        } else {
            self.objects.remove(&key);
        }
    }
}

fn found(object: Option<Value>) -> Response<Body> {
    object.map_or_else(|| failure(404, "not found"), success)
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the last use of what was built"
)]
fn success(object: Value) -> Response<Body> {
    respond(StatusCode::OK, &object)
}

fn failure(code: u16, message: &str) -> Response<Body> {
    let reason = match code {
        404 => "NotFound",
        409 => "AlreadyExists",
        403 => "Forbidden",
        422 => "Invalid",
        _ => "InternalError",
    };
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    });
    respond(StatusCode::from_u16(code).unwrap(), &status)
}

fn respond(code: StatusCode, body: &Value) -> Response<Body> {
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Body::from(serde_json::to_vec(body).unwrap()))
        .unwrap()
}
