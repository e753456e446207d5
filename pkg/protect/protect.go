// Package protect decides which tables, chains and rules of built-in chains canaryd guards, by
// owner.
//
// [Split] and [NewSelector] parse the value of --protect. A preset names the rules of one
// owner, such as kube-proxy or CNI plugins, and a word "rule:" names single rules.
// [Selector.Protection] extracts the protected part of iptables' tables, and
// [Selector.ProtectsTable] reports whether a native table is protected. [UnguardedIn] lists
// rules that nothing guards, and [Propose] returns the words that would guard them.
// [Attachments] and [Lacking] find the rules of single containers.
//
// NewSelector returns an error for an unknown word. The package does no I/O. Its values do not
// change after they were made, so many goroutines may use them at a time.
package protect

import "github.com/canaryd/canaryd/pkg/rules"

// Tables returns the tables that canaryd guards, in the order in which a replay writes them.
func Tables() []rules.TableName {
	return []rules.TableName{rules.Raw, rules.Mangle, rules.Nat, rules.Filter, rules.Security}
}

// TableCount is the number of these tables.
const TableCount = 5

// Always returns the tables of [Tables] that canaryd guards on each node. If such a table
// exists, it has marks, even if nothing is protected in it. Most flushes take at least one of
// these tables, and canaryd notices the next flush by the marks there.
func Always() []rules.TableName {
	return []rules.TableName{rules.Mangle, rules.Nat, rules.Filter}
}

// OnDemand reports whether a table is guarded only while something is protected in it. Until
// then it has no marks, and canaryd does not create it. Few nodes have rules in raw or
// security, and once a legacy table exists, the kernel takes each packet through it.
func OnDemand(t rules.TableName) bool { return t == rules.Raw || t == rules.Security }
