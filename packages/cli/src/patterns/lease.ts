import type { LeaseInfo } from "holdfast";
import { Failure, exitCodes } from "../failure.ts";
import type { Server } from "../server.ts";
import { age, note, print, printJson } from "../terminal.ts";
import { type ChangeOptions, agreed, recorded } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, printFacts, printTable, quoted, when } from "./show.ts";

interface Which {
  readonly fence?: number;
}

const state = ({ waiting, over }: LeaseInfo): string => (over ? "ran out" : waiting ? "in line" : "held");

/** The database's clock has said which of both it is; how long, this machine's says. */
function left({ until, over }: LeaseInfo): string {
  const ms = until.getTime() - Date.now();
  return over ? `${age(Math.max(0, -ms))} ago` : age(Math.max(0, ms));
}

function printLeases(leases: readonly LeaseInfo[]): void {
  printTable(
    ["lease", "state", "holder", "mode", "fence", "since (UTC)", "left"],
    leases.map((each) => [
      cell(each.name),
      state(each),
      cell(each.holder),
      each.mode,
      each.fence,
      when(each.since),
      left(each),
    ]),
    ["mode", "since (UTC)"],
  );
}

export async function list(options: PlaceOptions & { readonly limit: number }): Promise<void> {
  const { limit } = options;
  await onServer("lease", options, async ({ hf }) => {
    const leases = await hf.leases(undefined, { over: true, limit });
    if (options.json) printJson({ leases });
    else if (leases.length === 0) print("Nobody has a lease.");
    else printLeases(leases);
    if (leases.length === limit) note(`There may be more: --limit ${10 * limit}`);
  });
}

async function chosen({ hf }: Server, name: string | undefined, { fence }: Which) {
  if (name === undefined && fence === undefined)
    throw new Failure("Which lease? Name it, or its number with --fence.");
  return hf.leases(undefined, {
    over: true,
    ...(name !== undefined && { name }),
    ...(fence !== undefined && { fence }),
  });
}

const asked = (name: string | undefined, { fence }: Which): string =>
  [name === undefined ? "" : quoted(name), fence === undefined ? "" : `with fence ${fence}`]
    .filter((part) => part !== "")
    .join(" ");

const nobody = (name: string | undefined, which: Which): Failure =>
  new Failure(`Nobody has a lease ${asked(name, which)}. \`holdfast lease\` lists them.`);

export async function show(name: string | undefined, options: PlaceOptions & Which): Promise<void> {
  await onServer("lease", options, async (server) => {
    const leases = await chosen(server, name, options);
    const [only, ...more] = leases;
    if (!only) throw nobody(name, options);
    if (options.json) return printJson({ leases });
    if (more.length > 0) return printLeases(leases);
    printFacts({
      lease: only.name,
      state: only.over ? "ran out, and was never given back: its process died, or froze" : state(only),
      holder: only.holder,
      mode: only.mode,
      fence: only.fence,
      since: `${when(only.since)} UTC`,
      until: `${when(only.until)} UTC (${left(only)}${only.over ? "" : ", unless it is renewed"})`,
    });
  });
}

export async function end(name: string | undefined, options: ChangeOptions & Which): Promise<void> {
  await onServer("lease", options, async (server) => {
    const leases = await chosen(server, name, options);
    const held = leases.filter(({ waiting }) => !waiting);
    // Whoever stands in line is meant by its number only.
    const [only, ...more] = held.length > 0 || options.fence === undefined ? held : leases;
    if (!only) throw nobody(name, options);
    if (more.length > 0)
      throw new Failure(
        `${held.length} have ${quoted(only.name)}. Which one? ${held.map(({ fence, holder }) => `--fence ${fence} (${cell(holder)})`).join(", ")}.`,
      );
    const { fence, holder } = only;
    note(
      only.over
        ? `${quoted(only.name)} of ${cell(holder)} (fence ${fence}) ran out ${left(only)}: nobody is kept out by it.`
        : `${cell(holder)} has ${quoted(only.name)} (fence ${fence}) since ${when(only.since)} UTC, and learns of its loss with its next renewal. Until then fenced(tx, lease) refuses what it writes here; other systems know nothing of it.`,
    );
    if (!(await agreed(`Take the lease ${quoted(only.name)} from ${cell(holder)}?`, options))) return;
    const what = {
      action: "lease.end",
      target: ["lease", only.name],
      details: { holder, fence, mode: only.mode, since: only.since, until: only.until, over: only.over },
    };
    const ended = await recorded(server, what, { note: options.note, warn: note }, async () => ({
      ended: (await server.hf.endLease(fence)) !== undefined,
    }));
    if (!ended.ended) process.exitCode = exitCodes.no;
    if (options.json) printJson({ lease: only, ...ended });
    else
      print(
        ended.ended
          ? `${quoted(only.name)} is taken from ${cell(holder)}: a later fence than ${fence} counts from now on.`
          : `${quoted(only.name)} was given back meanwhile.`,
      );
  });
}
