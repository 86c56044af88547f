//! Every error that etcd answers with: its gRPC code and its text, byte for byte, since clients compare them.
//!
//! The only place where these texts stand. `rpc/status.rs` of the server turns its own errors into these.
//!
//! etcd: api/v3rpc/rpctypes/error.go.

use tonic::{Code, Status};

macro_rules! errors {
    ($($name:ident = $code:ident, $text:literal;)*) => {
        /// An answer that etcd gives as an error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Error {
            $(#[doc = concat!("`", stringify!($code), "`: \"", $text, "\"")] $name,)*
        }

        impl Error {
            /// All of them, in etcd's order.
            pub const ALL: &[Error] = &[$(Error::$name,)*];

            pub const fn code(self) -> Code {
                match self { $(Error::$name => Code::$code,)* }
            }

            pub const fn text(self) -> &'static str {
                match self { $(Error::$name => $text,)* }
            }
        }
    };
}

errors! {
    EmptyKey = InvalidArgument, "etcdserver: key is not provided";
    KeyNotFound = InvalidArgument, "etcdserver: key not found";
    ValueProvided = InvalidArgument, "etcdserver: value is provided";
    LeaseProvided = InvalidArgument, "etcdserver: lease is provided";
    TooManyOps = InvalidArgument, "etcdserver: too many operations in txn request";
    DuplicateKey = InvalidArgument, "etcdserver: duplicate key given in txn request";
    InvalidClientAPIVersion = InvalidArgument, "etcdserver: invalid client api version";
    InvalidSortOption = InvalidArgument, "etcdserver: invalid sort option";
    Compacted = OutOfRange, "etcdserver: mvcc: required revision has been compacted";
    FutureRev = OutOfRange, "etcdserver: mvcc: required revision is a future revision";
    NoSpace = ResourceExhausted, "etcdserver: mvcc: database space exceeded";
    LeaseNotFound = NotFound, "etcdserver: requested lease not found";
    LeaseExist = FailedPrecondition, "etcdserver: lease already exists";
    LeaseTTLTooLarge = OutOfRange, "etcdserver: too large lease TTL";
    WatchCanceled = Cancelled, "etcdserver: watch canceled";
    MemberExist = FailedPrecondition, "etcdserver: member ID already exist";
    PeerURLExist = FailedPrecondition, "etcdserver: Peer URLs already exists";
    MemberNotEnoughStarted = FailedPrecondition, "etcdserver: re-configuration failed due to not enough started members";
    MemberBadURLs = InvalidArgument, "etcdserver: given member URLs are invalid";
    MemberNotFound = NotFound, "etcdserver: member not found";
    MemberNotLearner = FailedPrecondition, "etcdserver: can only promote a learner member";
    LearnerNotReady = FailedPrecondition, "etcdserver: can only promote a learner member which is in sync with leader";
    TooManyLearners = FailedPrecondition, "etcdserver: too many learner members in cluster";
    ClusterIDMismatch = FailedPrecondition, "etcdserver: cluster ID mismatch";
    RequestTooLarge = InvalidArgument, "etcdserver: request is too large";
    RequestTooManyRequests = ResourceExhausted, "etcdserver: too many requests";
    RootUserNotExist = FailedPrecondition, "etcdserver: root user does not exist";
    RootRoleNotExist = FailedPrecondition, "etcdserver: root user does not have root role";
    UserAlreadyExist = FailedPrecondition, "etcdserver: user name already exists";
    UserEmpty = InvalidArgument, "etcdserver: user name is empty";
    UserNotFound = FailedPrecondition, "etcdserver: user name not found";
    RoleAlreadyExist = FailedPrecondition, "etcdserver: role name already exists";
    RoleNotFound = FailedPrecondition, "etcdserver: role name not found";
    RoleEmpty = InvalidArgument, "etcdserver: role name is empty";
    AuthFailed = InvalidArgument, "etcdserver: authentication failed, invalid user ID or password";
    PermissionNotGiven = InvalidArgument, "etcdserver: permission not given";
    PermissionDenied = PermissionDenied, "etcdserver: permission denied";
    RoleNotGranted = FailedPrecondition, "etcdserver: role is not granted to the user";
    PermissionNotGranted = FailedPrecondition, "etcdserver: permission is not granted to the role";
    AuthNotEnabled = FailedPrecondition, "etcdserver: authentication is not enabled";
    InvalidAuthToken = Unauthenticated, "etcdserver: invalid auth token";
    InvalidAuthMgmt = InvalidArgument, "etcdserver: invalid auth management";
    AuthOldRevision = InvalidArgument, "etcdserver: revision of auth store is old";
    NoLeader = Unavailable, "etcdserver: no leader";
    NotLeader = FailedPrecondition, "etcdserver: not leader";
    LeaderChanged = Unavailable, "etcdserver: leader changed";
    NotCapable = FailedPrecondition, "etcdserver: not capable";
    Stopped = Unavailable, "etcdserver: server stopped";
    Timeout = Unavailable, "etcdserver: request timed out";
    TimeoutDueToLeaderFail = Unavailable, "etcdserver: request timed out, possibly due to previous leader failure";
    TimeoutDueToConnectionLost = Unavailable, "etcdserver: request timed out, possibly due to connection lost";
    TimeoutWaitAppliedIndex = Unavailable, "etcdserver: request timed out, waiting for the applied index took too long";
    Unhealthy = Unavailable, "etcdserver: unhealthy cluster";
    Corrupt = DataLoss, "etcdserver: corrupt cluster";
    NotSupportedForLearner = FailedPrecondition, "etcdserver: rpc not supported for learner";
    BadLeaderTransferee = FailedPrecondition, "etcdserver: bad leader transferee";
    WrongDowngradeVersionFormat = InvalidArgument, "etcdserver: wrong downgrade target version format";
    InvalidDowngradeTargetVersion = InvalidArgument, "etcdserver: invalid downgrade target version";
    ClusterVersionUnavailable = FailedPrecondition, "etcdserver: cluster version not found during downgrade";
    DowngradeInProcess = FailedPrecondition, "etcdserver: cluster has a downgrade job in progress";
    NoInflightDowngrade = FailedPrecondition, "etcdserver: no inflight downgrade job";
    Canceled = Cancelled, "etcdserver: request canceled";
    DeadlineExceeded = DeadlineExceeded, "etcdserver: context deadline exceeded";
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Status::new(error.code(), error.text())
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_names_the_server_and_no_two_are_equal() {
        for (i, a) in Error::ALL.iter().enumerate() {
            assert!(a.text().starts_with("etcdserver: "), "{a:?}");
            for b in &Error::ALL[i + 1..] {
                assert_ne!(a.text(), b.text(), "{a:?} and {b:?}");
            }
        }
    }
}
