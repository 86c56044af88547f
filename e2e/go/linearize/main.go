// Command linearize is the judge of histories: porcupine, with a model of a store of revisions.
//
//	linearize [-timeout 60s] FILE...
//
// Each file is a window of a run (e2e/src/nemesis/record.rs). One line of JSON is printed per file; the exit code is 1 unless all of them
// are linearizable. Beside a file that is not, FILE.html shows where it went wrong.
//
// The model holds the whole store, so that an answer's revision says after how many changes it was given. What a request whose outcome
// nobody knows did is read from the changes that watches were told: a put by its value, which is unlike all others. A deletion that no known
// answer claims is a step of its own, which can come from any request of unknown outcome that could have made it, and after a lease
// ran out.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

type verdict struct {
	File       string `json:"file"`
	Result     string `json:"result"`
	Operations int    `json:"operations"`
	Unseen     int    `json:"unseen"`
	Message    string `json:"message"`
}

func main() {
	timeout := flag.Duration("timeout", time.Minute, "after which a history stays unknown")
	flag.Parse()
	bad := false
	for _, file := range flag.Args() {
		v := judge(file, *timeout)
		bad = bad || v.Result != "ok"
		line, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(line))
	}
	if bad || flag.NArg() == 0 {
		os.Exit(1)
	}
}

func judge(file string, timeout time.Duration) verdict {
	v := verdict{File: file, Result: "illegal"}
	text, err := os.ReadFile(file)
	if err != nil {
		v.Message = err.Error()
		return v
	}
	var w window
	if err := json.Unmarshal(text, &w); err != nil {
		v.Message = err.Error()
		return v
	}
	steps, unseen, err := w.steps()
	v.Unseen = unseen
	if err != nil {
		v.Message = err.Error()
		return v
	}
	v.Operations = len(steps)
	operations := make([]porcupine.Operation, len(steps))
	for i, s := range steps {
		operations[i] = porcupine.Operation{ClientId: s.Client, Input: s, Call: s.Call, Output: nil, Return: s.Back}
	}
	m := model(w)
	result, info := porcupine.CheckOperationsVerbose(m, operations, timeout)
	switch result {
	case porcupine.Ok:
		v.Result = "ok"
	case porcupine.Unknown:
		v.Result = "unknown"
	default:
		v.Message = "not linearizable: " + file + ".html"
		if err := porcupine.VisualizePath(m, info, file+".html"); err != nil {
			v.Message = err.Error()
		}
	}
	return v
}
