// Package protect says what canaryd guards: which tables, which chains and which rules of
// built-in chains, by owner. A preset names what one owner writes, such as kube-proxy or CNI
// plugins; a [Selector] is the value of --protect. It does no I/O; its values are not changed
// after they were made and may be used by many goroutines at a time.
package protect

import "github.com/canaryd/canaryd/pkg/rules"

// Tables returns the tables that canaryd guards, in the order in which a replay writes them.
func Tables() []rules.TableName { return []rules.TableName{rules.Mangle, rules.Nat, rules.Filter} }
