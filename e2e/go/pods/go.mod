module ballast.dev/e2e/go/pods

go 1.26
