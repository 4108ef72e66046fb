import type { Command } from "commander";
import { urlOption } from "../url.ts";
import type { CertifyFlags } from "../certify/run.ts";

const examples = `
It believes no name and no version: it tries with two sessions whether a lock excludes, whether what is read under it is the
newest, whether a row lock locks, and so on, and runs a short history through the checker. Each line says what was tried, what
was seen, what it carries, and what to do.

It makes one table and one routine with a random name in the database, says so before, and removes them afterwards, also after
Ctrl-C. With --read-only it makes none, and leaves out what needs them. Use the address and the user of the application.

One node of a cluster cannot tell what holds between nodes. With --node, A is put on the first node and B on another, and the other way
round. Nothing is committed on another node unless it shares its locks with the first one, or is one of a cluster that says so.

Examples:
  holdfast certify postgres://app@localhost/shop
  holdfast certify --url mysql://app@localhost/shop --html certificate.html
  holdfast certify file:app.db --json | jq -r '.probes[] | select(.verdict == "fails") | .id'
  holdfast certify --only lock-excludes lock-then-read
  holdfast certify mysql://app@node1/shop --node mysql://app@node2/shop --node mysql://app@node3/shop
  holdfast certify --list

The exit code is 0 if all that Holdfast relies on there holds, 1 if something does not, 2 if something could not be tried, and 130
if it was stopped. What is not there, and Holdfast knows, such as locks of sessions behind a pooler, is no failure.`;

export function certify(program: Command): void {
  urlOption(
    program
      .command("certify")
      .description("Try out, with two sessions, what may be relied on: on this server, by this way to it.")
      .argument("[url]", "the database, as with --url"),
  )
    .option(
      "--node <url>",
      "another node of the same cluster, to be tried against the first one; several times for several",
      (url: string, before: readonly string[] | undefined) => [...(before ?? []), url],
    )
    .option("--only <probe...>", "only these")
    .option("--list", "what is tried")
    .option("--read-only", "make nothing, write nothing, and leave out what needs it")
    .option("--html <file>", "write the report as a page")
    .option("--json", "print one JSON object")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast certify --help` lists the options.")
    .action(async (url: string | undefined, flags: CertifyFlags) => {
      // Loaded here, so that other verbs start without it.
      const { runCertify } = await import("../certify/run.ts");
      try {
        process.exitCode = await runCertify(url, flags);
      } finally {
        // A session that had to be given up may never end; nobody waits for it.
        setTimeout(() => process.exit(), 1000).unref();
      }
    });
}
