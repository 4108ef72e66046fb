import {
  type Grant,
  type HistoryEntry,
  type Period,
  type Quota,
  type QuotaOptions,
  type QuotaStanding,
  type Subject,
  type SubjectInfo,
  type Trust,
  quota,
  quotas,
  subjects,
} from "holdfast/quota";
import { Failure, exitCodes, interruptible } from "../failure.ts";
import type { Server } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { type By, type Change, type ChangeOptions, change } from "./change.ts";
import { subjectOf } from "./parse.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, counted, printFacts, printTable, quoted, when } from "./show.ts";
import { plural } from "../text.ts";

interface DefinitionOptions {
  readonly limit?: number;
  readonly per?: string;
  readonly window?: NonNullable<QuotaOptions["window"]>;
  readonly parts?: number;
  readonly timeZone?: string;
}

interface AmendOptions extends ChangeOptions, DefinitionOptions {
  readonly id?: string;
  readonly new?: true;
}

function defined(
  { hf }: Server,
  name: string,
  options: DefinitionOptions = {},
  limit: QuotaOptions["limit"] = options.limit ?? Infinity,
): Quota {
  const { per, window, parts, timeZone } = options;
  return quota(hf, {
    name,
    limit,
    ...(per !== undefined && { per: /^\d+$/.test(per) ? Number(per) : (per as Period) }),
    ...(window !== undefined && { window }),
    ...(parts !== undefined && { parts }),
    ...(timeZone !== undefined && { timeZone }),
  });
}

async function found({ hf }: Server, name: string, subject: Subject, typed: string): Promise<SubjectInfo> {
  const [info] = await subjects(hf, name, { of: [subject] });
  if (info) return info;
  await known(hf, name);
  throw new Failure(
    `Quota ${quoted(name)} has no subject ${quoted(typed)}. holdfast quota show lists those that it has.`,
  );
}

async function known(hf: Server["hf"], name: string): Promise<void> {
  if ((await subjects(hf, name, { limit: 1 })).length > 0) return;
  const all = (await quotas(hf)).map((each) => quoted(each.name));
  throw new Failure(
    `There is no quota ${quoted(name)}, or nothing of it was ever used.${all.length === 0 ? " There are none yet." : ` There are ${all.slice(0, 20).join(", ")}${all.length > 20 ? " …" : "."}`}`,
  );
}

export async function list(options: PlaceOptions): Promise<void> {
  await onServer("quota", options, async ({ hf }) => {
    const all = await quotas(hf);
    if (options.json) printJson({ quotas: all });
    else if (all.length === 0)
      print("There are no quotas yet: a quota is there once something of it was used.");
    else
      printTable(
        ["quota", "subjects"],
        all.map(({ name, subjects: n }) => [cell(name), counted(n)]),
      );
  });
}

export async function show(
  name: string,
  typed: string | undefined,
  options: PlaceOptions & DefinitionOptions & { readonly after?: string; readonly page?: number },
): Promise<void> {
  await onServer("quota", options, async (server) => {
    if (typed === undefined) await showAll(server, name, options);
    else await showOne(server, name, typed, options);
  });
}

async function showAll(
  { hf }: Server,
  name: string,
  { after, page = 100, json }: PlaceOptions & { readonly after?: string; readonly page?: number },
): Promise<void> {
  const all = await subjects(hf, name, { limit: page, ...(after !== undefined && { after }) });
  if (all.length === 0) await known(hf, name);
  if (json) {
    printJson({ quota: name, subjects: all });
    return;
  }
  printTable(
    ["subject", "used", "held", "credit", "own limit", "plan", "entries", "since (UTC)"],
    all.map((each) => [
      cell(each.subject),
      each.used,
      each.held,
      each.credit,
      each.limit ?? "",
      cell(each.plan),
      each.version,
      when(each.since),
    ]),
    ["since (UTC)", "entries", "plan"],
  );
  note("As the last entry of each left it.");
  if (all.length === page) note(`More: --after ${quoted(all.at(-1)?.subject ?? "")}`);
}

async function showOne(
  server: Server,
  name: string,
  typed: string,
  options: PlaceOptions & DefinitionOptions & { readonly page?: number },
): Promise<void> {
  const subject = subjectOf(typed);
  const stored = await found(server, name, subject, typed);
  const it = defined(server, name, options);
  const now = options.limit === undefined && options.per === undefined ? undefined : await it.peek(subject);
  const { entries } = await it.history(subject, { limit: options.page ?? 10 });
  const grants = await it.grants(subject);
  if (options.json) {
    printJson({ quota: name, stored, now: now ?? null, grants, entries });
    return;
  }
  printFacts({
    quota: name,
    subject: stored.subject,
    used: now?.used ?? stored.used,
    held: now?.held ?? stored.held,
    credit: now?.credit ?? stored.credit,
    limit: now && Number.isFinite(now.limit) ? now.limit : undefined,
    remaining: now && Number.isFinite(now.remaining) ? now.remaining : undefined,
    "own limit": stored.limit,
    plan: stored.plan,
    "counted since": stored.since && `${when(stored.since)} UTC`,
    "begins anew": now?.resetAt && `${when(now.resetAt)} UTC`,
  });
  if (grants.length > 0) {
    print();
    printGrants(grants);
  }
  print();
  printEntries(entries);
  if (!now)
    note(
      "As the last entry left it. Windows and limits are defined in your code: with --limit and --per, how it stands now.",
    );
}

function printGrants(grants: readonly Grant[]): void {
  printTable(
    ["grant", "left", "granted", "priority", "expires (UTC)", "at (UTC)"],
    grants.map((each) => [
      cell(each.id),
      each.left,
      each.amount,
      each.priority,
      each.expiresAt ? when(each.expiresAt) : "never",
      when(each.at),
    ]),
    ["at (UTC)", "priority"],
  );
}

export async function grants(name: string, typed: string, options: PlaceOptions): Promise<void> {
  await onServer("quota", options, async (server) => {
    const subject = subjectOf(typed);
    await found(server, name, subject, typed);
    const all = await defined(server, name).grants(subject);
    if (options.json) printJson({ quota: name, subject: typed, grants: all });
    else if (all.length === 0) print(`${quoted(typed)} has no credits of quota ${quoted(name)}.`);
    else printGrants(all);
  });
}

function printEntries(entries: readonly HistoryEntry[]): void {
  printTable(
    ["version", "at (UTC)", "kind", "amount", "used", "held", "credit", "by", "id"],
    entries.map((each) => [
      each.version,
      when(each.at),
      each.kind,
      each.amount,
      each.used,
      each.held,
      each.credit,
      cell(each.by),
      cell(each.of === undefined ? each.id : `${each.id} of ${each.of}`),
    ]),
    ["by", "held", "credit"],
  );
}

export async function history(
  name: string,
  typed: string,
  options: PlaceOptions & { readonly before?: number; readonly page: number },
): Promise<void> {
  await onServer("quota", options, async (server) => {
    const subject = subjectOf(typed);
    await found(server, name, subject, typed);
    const { before, page } = options;
    const { entries, next } = await defined(server, name).history(subject, {
      limit: page,
      ...(before !== undefined && { before }),
    });
    if (options.json) {
      printJson({ entries, next: next ?? null });
      return;
    }
    printEntries(entries);
    if (next !== undefined) note(`More: --before ${next}`);
  });
}

/** For the ledger: who did it, and where more is to be read. */
function about({ actor, line }: By, options: AmendOptions) {
  return {
    by: actor,
    source: "holdfast",
    reference: `audit:${line}`,
    ...(options.note !== undefined && { metadata: { note: options.note } }),
    ...(options.id !== undefined && { id: options.id }),
  };
}

/** Counting by another window than the code does would leave parts that do not come to what is used. */
function fits(name: string, { parts, since }: SubjectInfo, options: DefinitionOptions): void {
  if (options.per === undefined || (parts === undefined && since === undefined)) return;
  const meant = options.window === "sliding-parts" ? (options.parts ?? 20) : undefined;
  if (meant === parts) return;
  throw new Failure(
    parts === undefined
      ? `Quota ${quoted(name)} is not counted in parts: --window sliding-parts is not what your code says.`
      : `Quota ${quoted(name)} is counted in ${parts} parts: say --window sliding-parts --parts ${parts}.`,
  );
}

/** One change of one subject, asked for and written down. */
async function amend<T extends QuotaStanding>(
  name: string,
  typed: string,
  options: AmendOptions,
  what: {
    readonly verb: string;
    readonly question: (subject: string) => string;
    readonly details: Readonly<Record<string, unknown>>;
    readonly check?: (info: SubjectInfo) => void;
    readonly limit?: QuotaOptions["limit"];
  },
  work: (it: Quota, subject: Subject, by: By) => Promise<T>,
): Promise<void> {
  await onServer("quota", options, async (server) => {
    const subject = subjectOf(typed);
    const it = defined(server, name, options, what.limit);
    const info = options.new
      ? (await subjects(server.hf, name, { of: [subject] }))[0]
      : await found(server, name, subject, typed);
    if (info) fits(name, info, options);
    if (info) what.check?.(info);
    const asked: Change = {
      question: what.question(`quota ${quoted(name)} of ${quoted(typed)}`),
      action: `quota.${what.verb}`,
      target: ["quota", name, info?.subject ?? typed],
      details: { ...what.details, id: options.id },
    };
    const done = await change(server, asked, options, (by) => work(it, subject, by));
    if (!done) return;
    const [after] = await subjects(server.hf, name, { of: [subject] });
    if (options.json) printJson({ quota: name, subject: typed, result: done, stored: after ?? null });
    else {
      const limit = after?.limit === undefined ? "" : `, own limit ${after.limit}`;
      const plan = after?.plan === undefined ? "" : `, plan ${quoted(after.plan)}`;
      print(`Done: ${done.used} used, ${done.held} held, ${done.credit} of credits left${limit}${plan}.`);
    }
  });
}

export async function grant(
  name: string,
  typed: string,
  amount: number,
  options: AmendOptions & { readonly expires?: Date; readonly priority?: number },
): Promise<void> {
  const { expires, priority } = options;
  if (expires && expires.getTime() <= Date.now())
    throw new Failure(`--expires ${when(expires)} UTC is over already: nobody could use the credits.`);
  const until = expires ? ` until ${when(expires)} UTC` : "";
  await amend(
    name,
    typed,
    options,
    {
      verb: "grant",
      question: (of) => `Grant ${plural(amount, "credit")}${until} on top of ${of}?`,
      details: { amount, expires, priority },
    },
    (it, subject, by) =>
      it.grant(subject, amount, {
        ...about(by, options),
        ...(expires && { expiresAt: expires }),
        ...(priority !== undefined && { priority }),
      }),
  );
}

export async function revoke(name: string, typed: string, id: string, options: AmendOptions): Promise<void> {
  await amend(
    name,
    typed,
    options,
    {
      verb: "revoke",
      question: (of) =>
        `Take back what is left of grant ${quoted(id)} on top of ${of}? What was used of it stays used.`,
      details: { grant: id },
    },
    (it, subject, by) => it.revoke(subject, id, about(by, options)),
  );
}

export async function limit(
  name: string,
  typed: string,
  n: number | "none",
  options: AmendOptions,
): Promise<void> {
  await amend(
    name,
    typed,
    options,
    {
      verb: "limit",
      question: (of) =>
        n === "none" ? `Take away the limit of its own from ${of}?` : `Set the limit of ${of} to ${n}?`,
      details: { limit: n },
    },
    (it, subject, by) => it.setLimit(subject, n === "none" ? undefined : n, about(by, options)),
  );
}

export async function plan(
  name: string,
  typed: string,
  chosen: string,
  options: AmendOptions,
): Promise<void> {
  const none = chosen === "none";
  await amend(
    name,
    typed,
    options,
    {
      verb: "plan",
      question: (of) =>
        none ? `Take away the plan from ${of}?` : `Set the plan of ${of} to ${quoted(chosen)}?`,
      details: { plan: chosen },
      // Which plans there are is in the code.
      ...(!none && { limit: { plans: { [chosen]: options.limit ?? Infinity }, default: chosen } }),
    },
    (it, subject, by) => it.setPlan(subject, none ? undefined : chosen, about(by, options)),
  );
}

export async function reset(name: string, typed: string, options: AmendOptions): Promise<void> {
  await amend(
    name,
    typed,
    options,
    { verb: "reset", question: (of) => `Forget all that was used of ${of}?`, details: {} },
    (it, subject, by) => it.reset(subject, about(by, options)),
  );
}

export async function refund(
  name: string,
  typed: string,
  entry: string,
  amount: number | undefined,
  options: AmendOptions,
): Promise<void> {
  await amend(
    name,
    typed,
    options,
    {
      verb: "refund",
      question: (of) => `Give back ${amount ?? "all that is left"} of entry ${quoted(entry)} to ${of}?`,
      details: { entry, amount },
      // Without its window, what is not counted any more would be given back too.
      check: ({ since }) => {
        if (since !== undefined && options.per === undefined)
          throw new Failure(
            `Quota ${quoted(name)} has a window, which is defined in your code: name it with --per (and --window, --time-zone), so that only what it still counts is given back.`,
          );
      },
    },
    (it, subject, by) =>
      it.refund(subject, entry, { ...about(by, options), ...(amount !== undefined && { amount }) }),
  );
}

interface Wrong {
  readonly subject: string;
  readonly findings: readonly string[];
}

const page = 500;
/** As many as there are connections. */
const atOnce = 4;

export async function reconcile(
  name: string,
  typed: string | undefined,
  options: ChangeOptions & { readonly repair?: true; readonly trust: Trust },
): Promise<void> {
  await onServer("quota", options, async (server) => {
    using stop = interruptible();
    const it = defined(server, name);
    const wrong: Wrong[] = [];
    let [looked, entries] = [0, 0];
    const look = async ({ subject }: SubjectInfo): Promise<void> => {
      const done = await it.reconcile(subjectOf(subject));
      looked++;
      entries += done.entries;
      if (!done.ok) wrong.push({ subject, findings: done.findings });
    };
    const watched = process.stderr.isTTY && !options.json;
    for await (const some of pages(server, name, typed)) {
      for (let i = 0; i < some.length; i += atOnce) {
        stop.signal.throwIfAborted();
        await Promise.all(some.slice(i, i + atOnce).map(look));
      }
      if (watched) process.stderr.write(`\r${looked} looked at, ${wrong.length} wrong\u001b[K`);
    }
    if (watched) process.stderr.write("\r\u001b[K");
    wrong.sort((a, b) => (a.subject < b.subject ? -1 : 1));
    if (!options.json) {
      for (const { subject, findings } of wrong)
        for (const finding of findings) print(`${cell(subject)}: ${cell(finding)}`);
      print(
        `${plural(looked, "subject")}, ${plural(entries, "entry", "entries")}: ${wrong.length === 0 ? "all of it adds up" : `${plural(wrong.length, "subject")} that ${wrong.length === 1 ? "does" : "do"} not add up`}.`,
      );
    }
    const repaired =
      wrong.length > 0 && options.repair ? await repair(server, name, it, wrong, options) : undefined;
    if (wrong.length > 0 && repaired === undefined) process.exitCode = exitCodes.no;
    if (options.json)
      printJson({ quota: name, subjects: looked, entries, wrong, repaired: repaired !== undefined });
    // Somebody else may have been faster.
    else if (repaired !== undefined) print(`${plural(repaired, "subject")} repaired.`);
  });
}

async function* pages(
  server: Server,
  name: string,
  typed: string | undefined,
): AsyncGenerator<readonly SubjectInfo[]> {
  if (typed !== undefined) {
    yield [await found(server, name, subjectOf(typed), typed)];
    return;
  }
  for (let after: string | undefined; ;) {
    const some = await subjects(server.hf, name, { limit: page, ...(after !== undefined && { after }) });
    if (some.length === 0 && after === undefined) await known(server.hf, name);
    yield some;
    if (some.length < page) return;
    after = some.at(-1)?.subject;
  }
}

async function repair(
  server: Server,
  name: string,
  it: Quota,
  wrong: readonly Wrong[],
  options: ChangeOptions & { readonly trust: Trust },
): Promise<number | undefined> {
  const [one] = wrong;
  // What was found is printed either way, in one document.
  const { json: _, ...asked } = options;
  const { trust } = options;
  const done = await change(
    server,
    {
      question:
        trust === "ledger"
          ? `Set what is counted to what the ledger says, of ${plural(wrong.length, "subject")}?`
          : `Let the ledger say what is counted now, of ${plural(wrong.length, "subject")}? Whatever changed it without an entry counts then.`,
      action: "quota.repair",
      target: wrong.length === 1 && one ? ["quota", name, one.subject] : ["quota", name],
      details: { trust, wrong: wrong.slice(0, 100) },
    },
    asked,
    async () => {
      let n = 0;
      for (const { subject } of wrong)
        if ((await it.reconcile(subjectOf(subject), { repair: true, trust })).repaired) n++;
      return { subjects: n };
    },
  );
  return done?.subjects;
}
