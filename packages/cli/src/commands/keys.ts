import type { Command } from "commander";
import { urlOption } from "../url.ts";

export interface KeysOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly find?: string;
  readonly names?: string;
  readonly database?: string;
  readonly json?: true;
}

const examples = `
A name is written as holdfast locks shows it: image-upload:42 is key("image-upload", "42"). Where a part holds a colon:
'["a:b","42"]'.

Examples:
  holdfast keys                             what is in use now, and whether two names have one id
  holdfast keys image-upload:42             what it hashes to, and the SQL that takes it (needs no database)
  holdfast keys --find 2939424002059277525  which of the names in use that is
  holdfast keys --find 684387982,1593840853  the same for classid and objid of pg_locks
  cut -d, -f1 users.csv | sed 's/^/image-upload:/' | holdfast keys --names - --find 2939424002059277525

The exit code of --find is 1 if no name was found.`;

export function keys(program: Command): void {
  urlOption(program.command("keys"))
    .description("Namespaces in use, what a name hashes to, and which name a lock of pg_locks is.")
    .argument("[name...]", "names of keys")
    .option("--find <id>", "which name it is: a number of 64 bits, or classid,objid")
    .option("--names <file>", "names to look at, one per line; - reads standard input")
    .option("--database <name>", "of MySQL or MariaDB: names of GET_LOCK depend on it")
    .option("--json", "print one JSON document")
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast keys --help` lists the options.")
    .action(async (names: string[], options: KeysOptions) => {
      const { runKeys } = await import("../keys/run.ts");
      await runKeys(names, options);
    });
}
