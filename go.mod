module github.com/canaryd/canaryd

go 1.26
