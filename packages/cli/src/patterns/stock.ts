import {
  type Applied,
  type CurrentLevel,
  type Stock,
  type StockOptions,
  type Trust,
  stock as stockOf,
  stocks,
} from "holdfast/stock";
import { Failure, exitCodes, jsonErrorOf } from "../failure.ts";
import { keepJsonError } from "../json.ts";
import type { Server } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { type ChangeOptions, change } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, printTable, quoted, when } from "./show.ts";
import { plural } from "../text.ts";

interface BookOptions extends PlaceOptions {
  readonly name?: string;
  readonly table?: string;
  readonly skuColumn?: string;
  readonly onHandColumn?: string;
  readonly locationColumn?: string;
  readonly minColumn?: string;
  readonly new?: true;
}

interface SpotOptions extends BookOptions, ChangeOptions {
  readonly location?: string;
  readonly id?: string;
}

interface SpanOptions {
  readonly location?: string;
  readonly from?: Date;
  readonly to?: Date;
}

/** Empty: they are kept with us. */
function ownLevels(options: BookOptions): Pick<StockOptions, "levels"> {
  const { table, skuColumn: sku, onHandColumn: onHand, locationColumn, minColumn } = options;
  if (table === undefined) {
    if (sku ?? onHand ?? locationColumn ?? minColumn)
      throw new Failure("Columns of which table? Name it with --table.");
    return {};
  }
  if (sku === undefined || onHand === undefined)
    throw new Failure("With --table, name its columns: --sku-column and --on-hand-column.");
  return {
    levels: {
      table: table.split("."),
      sku,
      onHand,
      ...(locationColumn !== undefined && { location: locationColumn }),
      ...(minColumn !== undefined && { minLevel: minColumn }),
    },
  };
}

/** `exact`: what is on hand matters, and must not be taken from a copy of it. */
async function opened({ hf }: Server, options: BookOptions, exact: boolean): Promise<Stock> {
  const own = ownLevels(options);
  const name = options.name ?? "stock";
  const books = await stocks(hf);
  const book = books.find((each) => each.name === name);
  // The first one may be made by what is put in.
  if (!book && !own.levels && (books.length > 0 || (options.name !== undefined && !options.new)))
    throw new Failure(
      books.length === 0
        ? `There is no stock ${quoted(name)}: there are none yet.`
        : `There is no stock ${quoted(name)}. There are ${books.map((each) => quoted(each.name)).join(", ")}: choose with --name.`,
    );
  if (book?.elsewhere && !own.levels) {
    const where = `What is on hand of stock ${quoted(name)} is kept in a table of yours`;
    if (exact)
      throw new Failure(
        `${where}: name it with --table, --sku-column and --on-hand-column, as your code does.`,
      );
    note(`${where}. Without --table, this is what the last movement left.`);
  }
  return stockOf(hf, { name, ...own });
}

interface ListOptions extends BookOptions {
  readonly sku?: readonly string[];
  readonly location?: string;
  readonly below?: number;
  readonly limit: number;
  readonly after?: readonly string[];
}

const pageSize = 1000;

/** Page after page, until there are enough. */
async function select(it: Stock, options: ListOptions): Promise<readonly CurrentLevel[]> {
  const { sku, location, below, limit } = options;
  const [first, at = "main"] = options.after ?? [];
  let after = first === undefined ? undefined : { sku: first, location: at };
  const chosen: CurrentLevel[] = [];
  for (;;) {
    const page = await it.levels({
      limit: below === undefined ? Math.min(pageSize, limit - chosen.length) : pageSize,
      ...(sku && { skus: sku }),
      ...(location !== undefined && { location }),
      ...(after && { after }),
    });
    for (const level of page)
      if ((below === undefined || level.available < below) && chosen.push(level) === limit) return chosen;
    const last = page.at(-1);
    if (!last) return chosen;
    after = { sku: last.sku, location: last.location };
  }
}

export async function list(options: ListOptions): Promise<void> {
  await onServer("stock", options, async (server) => {
    const it = await opened(server, options, false);
    const levels = await select(it, options);
    const { location } = options;
    if (
      levels.length === 0 &&
      location !== undefined &&
      (await it.levels({ location, limit: 1 })).length === 0
    )
      throw new Failure(`There is no stock at ${quoted(location)}.`);
    const missing = (options.sku ?? []).filter((sku) => !levels.some((level) => level.sku === sku));
    const last = levels.length === options.limit ? levels.at(-1) : undefined;
    const next = last && { sku: last.sku, location: last.location };
    const unknown =
      missing.length > 0 && options.below === undefined && !next
        ? new Failure(`There is no SKU ${missing.map(quoted).join(", ")}.`)
        : undefined;
    if (options.json) {
      if (unknown) keepJsonError(jsonErrorOf(unknown));
      printJson({ levels, next: next ?? null });
    } else if (levels.length === 0) {
      const narrowed = options.sku ?? options.location ?? options.below ?? options.after;
      print(
        narrowed === undefined
          ? "There is no stock yet: a level is made by what is first put in."
          : "There is nothing of that kind.",
      );
    } else {
      printTable(
        ["sku", "location", "on hand", "reserved", "minimum", "available"],
        levels.map((level) => [
          cell(level.sku),
          cell(level.location),
          level.onHand,
          level.reserved,
          level.min,
          level.available,
        ]),
      );
      if (next) note(`More: --after ${quoted(next.sku)} ${quoted(next.location)}`);
    }
    if (unknown) throw unknown;
  });
}

export async function history(
  sku: string | undefined,
  options: BookOptions &
    SpanOptions & { readonly source?: string; readonly page: number; readonly next?: string },
): Promise<void> {
  await onServer("stock", options, async (server) => {
    const it = stockOf<{ source: string }>(server.hf, { name: (await opened(server, options, false)).name });
    if (sku !== undefined) await known(it, sku, options.location);
    const { location, from, to, source, page, next: after } = options;
    const { movements, next } = await it.history({
      limit: page,
      ...(sku !== undefined && { sku }),
      ...(location !== undefined && { location }),
      ...(from && { from }),
      ...(to && { to }),
      ...(source !== undefined && { source }),
      ...(after !== undefined && { after }),
    });
    if (options.json) {
      printJson({ movements, next: next ?? null });
      return;
    }
    printTable(
      ["at (UTC)", "sku", "location", "kind", "quantity", "balance", "source", "by", "note or id"],
      movements.map((each) => [
        when(each.at),
        cell(each.sku),
        cell(each.location),
        each.kind,
        each.quantity,
        each.balance,
        cell(each.source),
        cell(each.by),
        cell(each.note ?? each.externalId),
      ]),
      ["by", "kind", "location"],
    );
    if (next !== undefined) note(`More: --next ${next}`);
  });
}

async function known(it: Stock, sku: string, location: string | undefined): Promise<readonly CurrentLevel[]> {
  const levels = await it.levels({ skus: [sku], ...(location !== undefined && { location }) });
  if (levels.length > 0) return levels;
  const there = location === undefined ? [] : await it.levels({ skus: [sku] });
  throw new Failure(
    there.length === 0
      ? `There is no SKU ${quoted(sku)}.`
      : `There is no SKU ${quoted(sku)} at ${quoted(location ?? "")}. It is at ${there.map((level) => quoted(level.location)).join(", ")}.`,
  );
}

async function moved(
  sku: string,
  options: SpotOptions,
  what: {
    readonly verb: string;
    readonly question: (where: string, onHand: number | undefined) => string;
    readonly details: Readonly<Record<string, unknown>>;
    readonly work: (
      it: Stock,
      about: { location: string; source: "MANUAL"; by: string; note?: string; externalId?: string },
    ) => Promise<Applied>;
  },
): Promise<void> {
  await onServer("stock", options, async (server) => {
    const { location = "main", note: why, id } = options;
    const it = await opened(server, options, true);
    const level = options.new
      ? (await it.levels({ skus: [sku], location }))[0]
      : (await known(it, sku, location))[0];
    const done = await change(
      server,
      {
        question: what.question(`${quoted(sku)} at ${quoted(location)}`, level?.onHand),
        action: `stock.${what.verb}`,
        target: ["stock", it.name, sku, location],
        details: { ...what.details, before: level?.onHand, id },
      },
      options,
      ({ actor }) =>
        what.work(it, {
          location,
          source: "MANUAL",
          by: actor,
          ...(why !== undefined && { note: why }),
          ...(id !== undefined && { externalId: id }),
        }),
    );
    if (!done) return;
    const [line] = done.lines;
    if (options.json) printJson({ stock: it.name, ...done });
    else
      print(
        `${quoted(sku)} at ${quoted(location)}: ${line?.onHand} on hand, after a movement of ${line?.quantity}${done.replayed ? " that had been made before under this id" : ""}.`,
      );
  });
}

const now = (onHand: number | undefined) => (onHand === undefined ? "there was none yet" : `now ${onHand}`);

export function adjust(sku: string, counted: number, options: SpotOptions): Promise<void> {
  return moved(sku, options, {
    verb: "adjust",
    question: (where, onHand) => `Set ${where} to ${counted} (${now(onHand)})?`,
    details: { count: counted },
    work: (it, about) => it.adjustTo(sku, counted, about),
  });
}

export function move(
  sku: string,
  verb: "add" | "take",
  quantity: number,
  options: SpotOptions,
): Promise<void> {
  return moved(sku, options, {
    verb,
    question: (where, onHand) =>
      `${verb === "add" ? "Add" : "Take"} ${quantity} ${verb === "add" ? "to" : "of"} ${where} (${now(onHand)})?`,
    details: { quantity },
    work: (it, about) =>
      verb === "add" ? it.increase(sku, quantity, about) : it.decrease(sku, quantity, about),
  });
}

export async function reconcile(
  sku: string | undefined,
  options: SpotOptions & { readonly repair?: true; readonly trust: Trust },
): Promise<void> {
  await onServer("stock", options, async (server) => {
    const it = await opened(server, options, true);
    const { location } = options;
    if (sku !== undefined) await known(it, sku, location);
    const which = { ...(sku !== undefined && { sku }), ...(location !== undefined && { location }) };
    const found = await it.reconcile(which);
    const { levels, movements, findings } = found;
    if (!options.json) {
      for (const { text } of findings) print(cell(text) as string);
      print(
        `${plural(levels, "level")}, ${plural(movements, "movement")}: ${findings.length === 0 ? "all of it adds up" : plural(findings.length, "thing that does not add up", "things that do not add up")}.`,
      );
    }
    let repaired = false;
    if (findings.length > 0 && options.repair) {
      // What was found is printed either way, in one document.
      const { json: _, ...asked } = options;
      const done = await change(
        server,
        {
          question:
            options.trust === "ledger"
              ? "Set what is on hand to what the movements come to?"
              : "Write movements of what is missing, so that they come to what is on hand? Whatever changed it without one counts then.",
          action: "stock.repair",
          target: [
            "stock",
            it.name,
            ...(sku === undefined ? [] : [sku]),
            ...(location === undefined ? [] : [location]),
          ],
          details: { trust: options.trust, findings: findings.slice(0, 100).map(({ text }) => text) },
        },
        asked,
        async ({ actor }) => {
          const { repaired: mended, findings: then } = await it.reconcile({
            ...which,
            repair: true,
            trust: options.trust,
            by: actor,
            ...(options.note !== undefined && { note: options.note }),
          });
          return { repaired: mended, findings: then.length };
        },
      );
      repaired = done !== undefined;
    }
    if (findings.length > 0 && !repaired) process.exitCode = exitCodes.no;
    if (options.json) printJson({ stock: it.name, levels, movements, findings, repaired });
    else if (repaired) print("Repaired.");
  });
}

export async function channels(sku: string | undefined, options: BookOptions & SpanOptions): Promise<void> {
  await onServer("stock", options, async (server) => {
    const it = await opened(server, options, false);
    const { location, from, to } = options;
    if (sku !== undefined) await known(it, sku, location);
    const sums = await it.byChannel({
      ...(sku !== undefined && { sku }),
      ...(location !== undefined && { location }),
      ...(from && { from }),
      ...(to && { to }),
    });
    if (options.json) printJson({ channels: sums });
    else if (sums.length === 0) print("There are no movements of that kind.");
    else
      printTable(
        ["source", "movements", "increased", "decreased", "net"],
        sums.map((each) => [cell(each.source), each.movements, each.increased, each.decreased, each.net]),
      );
  });
}
