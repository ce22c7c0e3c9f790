"""Interpreter with which Ray's workers start quickly on this machine: they are forks of processes that have imported the slow modules.

When Ray starts a node with this interpreter, the process becomes the node's fork server, which starts the node as a fork of itself. When
the node's raylet starts a worker with it, it asks the fork server for a fork, which takes over its standard streams, and waits for the
fork's end (interpreter.py). The workers of a job are forks of a process of the job, because Ray reads a job's id from the environment
when it is imported, and this process is a fork of the node's fork server (server.py).

Workers import Undula themselves, from where a user's workers would, unless the node is for a job that has the Undula of this machine.

Imports between its modules are relative, because the servers have them under another name: workers import the Undula that their job has.
"""
