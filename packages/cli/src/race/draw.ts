/** A schedule as a picture: one lane for each actor, time goes down. */
import { basename, isAbsolute, relative } from "node:path";
import type { Turn } from "holdfast/testing";
import { type Release, releaseOf, transactions } from "./lanes.ts";
import { colors, picture } from "./style.ts";
import { escape, wrap } from "./text.ts";

export interface DrawOptions {
  readonly turns: readonly Turn[];
  readonly actors: readonly string[];
  /** Of the whole picture, if its lanes do not get narrower than they may. */
  readonly width: number;
  readonly narrow: boolean;
  /** Begins the ids, which are the page's. */
  readonly id: string;
}

interface Line {
  readonly text: string;
  readonly kind: "sql" | "read" | "stale" | "error" | "place";
}

/** Where a turn is. */
interface Box {
  readonly turn: Turn;
  readonly lane: number;
  readonly lines: readonly Line[];
  readonly top: number;
  readonly height: number;
  /** The end of all that belongs to it. */
  readonly bottom: number;
  readonly switchAt: number | undefined;
}

const looks = {
  wide: { lane: [230, 470], font: 12, statement: 5, others: 3 },
  narrow: { lane: [156, 200], font: 10, statement: 8, others: 4 },
} as const;

/** Of a character of a fixed-width font, in its size; some are narrower. */
const em = 0.61;
const pad = 8;
/** From the line of the lane to the box, and from the box to the next lane. */
const [indent, margin] = [13, 9];
const gap = 10;
const head = 34;
/** Around a picture that is a file. */
const frame = 16;

export function draw(options: DrawOptions): string {
  return new Drawing(options).svg();
}

/** The same as a file of its own, below a heading: for a README, by day and by night. */
export function drawFile(heading: readonly string[], options: Omit<DrawOptions, "id" | "narrow">): string {
  const drawing = new Drawing({ ...options, id: "schedule", narrow: false });
  const [width, top] = [drawing.width + 2 * frame, frame + heading.length * 20 + 4];
  const height = top + drawing.height + frame / 2;
  const lines = heading.map((line, i) => {
    const [text = ""] = wrap(line, Math.floor(drawing.width / (13 * em)), 1);
    return `<text class="heading" x="${frame}" y="${frame + 14 + i * 20}" font-size="13">${escape(text)}</text>`;
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" class="schedule" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`,
    `<style>${colors}${picture}.schedule .heading { font-weight: 700; } .schedule .ground { fill: var(--card); stroke: var(--line); }</style>`,
    `<rect class="ground" x="0.5" y="0.5" width="${width - 1}" height="${height - 1}" rx="10"/>`,
    ...lines,
    `<g transform="translate(${frame} ${top})">`,
    drawing.svg(),
    "</g>",
    "</svg>",
    "",
  ].join("\n");
}

class Drawing {
  readonly #options: DrawOptions;
  readonly #look: (typeof looks)["wide" | "narrow"];
  /** For the numbers. */
  readonly #gutter: number;
  readonly #lane: number;
  readonly #lineHeight: number;
  readonly #boxes: readonly Box[];
  readonly width: number;
  readonly height: number;

  constructor(options: DrawOptions) {
    this.#options = options;
    const look = (this.#look = options.narrow ? looks.narrow : looks.wide);
    this.#gutter = Math.ceil(String(options.turns.length).length * look.font * em) + 12;
    const [least, most] = look.lane;
    const room = Math.floor((options.width - this.#gutter) / options.actors.length);
    this.#lane = Math.max(least, Math.min(most, room));
    this.#lineHeight = Math.round(look.font * 1.4);
    this.#boxes = this.#layOut();
    this.width = this.#gutter + this.#lane * options.actors.length;
    this.height = (this.#boxes.at(-1)?.bottom ?? head) + gap;
  }

  svg(): string {
    const { id, actors, turns } = this.#options;
    const { width, height } = this;
    const title = `Schedule of ${actors.join(", ")} in ${turns.length} steps`;
    return [
      `<svg class="schedule" role="img" aria-labelledby="${id}-title" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-size="${this.#look.font}">`,
      `<title id="${id}-title">${escape(title)}</title>`,
      this.#definitions(),
      ...actors.map((actor, i) => this.#laneOf(actor, i)),
      ...transactions(turns).map(({ actor, from, to }) => this.#transaction(actor, from, to)),
      ...this.#boxes.map((box) => this.#switch(box, width)),
      ...this.#boxes.map((box, i) => this.#wait(box, i)),
      ...this.#boxes.map((box) => this.#box(box)),
      "</svg>",
    ]
      .filter((part) => part !== "")
      .join("\n");
  }

  #layOut(): Box[] {
    const boxes: Box[] = [];
    let y = head + gap;
    for (const turn of this.#options.turns) {
      const switchAt = turn.switched ? y + gap / 2 : undefined;
      if (turn.switched) y += gap * 2;
      const lines = this.#lines(turn);
      const height = lines.length * this.#lineHeight + pad + 2;
      // Room for what it waits for.
      const after = turn.waitsFor.length > 0 ? this.#lineHeight + 16 : 0;
      const lane = Math.max(0, this.#options.actors.indexOf(turn.actor));
      boxes.push({ turn, lane, lines, top: y, height, bottom: y + height + after, switchAt });
      y += height + after + gap;
    }
    return boxes;
  }

  #lines(turn: Turn): Line[] {
    const width = Math.floor((this.#lane - indent - margin - 2 * pad) / (this.#look.font * em));
    const { statement, others } = this.#look;
    const lines = (kind: Line["kind"], text: string, most: number) =>
      wrap(text, width, most).map((line) => ({ text: line, kind }));
    return [
      ...lines("sql", turn.statement || "(no text)", statement),
      ...(turn.rows.length > 0 ? lines("read", `→ ${rowsOf(turn)}`, others) : []),
      ...(turn.stale ? lines("stale", "◄ stale: it changed before it was used", others) : []),
      ...(turn.error === undefined ? [] : lines("error", `✗ ${turn.error}`, others)),
      ...(turn.place === undefined ? [] : lines("place", placeOf(turn.place), 1)),
    ];
  }

  #x(lane: number): number {
    return this.#gutter + lane * this.#lane + 3;
  }

  #definitions(): string {
    const { id } = this.#options;
    return [
      "<defs>",
      `<marker id="${id}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker>`,
      `<pattern id="${id}-stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="stripe" d="M0 3H6"/></pattern>`,
      "</defs>",
    ].join("");
  }

  #laneOf(actor: string, i: number): string {
    const x = this.#x(i);
    const letter = String.fromCharCode(65 + i);
    const name = actor === letter ? actor : `${letter} · ${actor}`;
    const width = Math.floor((this.#lane - margin - 2) / (this.#look.font * em));
    return [
      `<path class="life" d="M${x} ${head - 4}V${this.height}"/>`,
      `<text class="actor" x="${x - 3}" y="${head - 14}"><title>${escape(name)}</title>${escape(wrap(name, width, 1)[0] ?? "")}</text>`,
    ].join("");
  }

  #transaction(actor: string, from: number, to: number): string {
    const [first, last] = [this.#boxes[from], this.#boxes[to]];
    if (!first || !last) return "";
    const height = last.top + last.height - first.top;
    return `<rect class="transaction" x="${this.#x(first.lane) - 2.5}" y="${first.top}" width="5" height="${height}" rx="2.5"><title>${escape(`${actor}'s transaction is open`)}</title></rect>`;
  }

  #switch({ switchAt }: Box, width: number): string {
    if (switchAt === undefined) return "";
    const label = this.#look.font * em * 6 + 10;
    return `<g class="switch"><path d="M${this.#gutter} ${switchAt}H${width - label - margin}"/><text x="${width - margin}" y="${switchAt + this.#look.font * 0.35}" text-anchor="end">switch</text></g>`;
  }

  #box({ turn, lane, lines, top, height }: Box): string {
    const x = this.#x(lane) + indent;
    const width = this.#lane - indent - margin;
    const kind = turn.error !== undefined ? " failed" : turn.stale ? " outdated" : "";
    const text = lines.map(
      ({ text, kind: of }, i) =>
        `<tspan class="${of}" x="${x + pad}" y="${top + pad / 2 + (i + 1) * this.#lineHeight - this.#look.font * 0.25}">${escape(text)}</tspan>`,
    );
    return [
      `<g class="step${kind}"><title>${escape(tooltip(turn))}</title>`,
      `<text class="number" x="${this.#gutter - 7}" y="${top + pad / 2 + this.#lineHeight - this.#look.font * 0.25}" text-anchor="end">${turn.n}</text>`,
      `<path class="stub" d="M${x - indent + 2.5} ${top + 12}H${x}"/>`,
      `<rect x="${x}" y="${top}" width="${width}" height="${height}" rx="5"/>`,
      `<text>${text.join("")}</text></g>`,
    ].join("");
  }

  /** An hourglass on a bar that is as long as the wait, and an arrow from what ended it. */
  #wait(box: Box, i: number): string {
    const release = releaseOf(this.#options.turns, i);
    if (!release) return "";
    const from = box.top + box.height;
    const to = this.#moment(release);
    const x = this.#x(box.lane) + indent + 6;
    const label = `waits for ${box.turn.waitsFor.join(", ")}`;
    const width = Math.floor((this.#lane - indent - margin - 30) / (this.#look.font * em));
    return [
      `<g class="wait"><title>${escape(`${box.turn.actor} ${label}`)}</title>`,
      `<rect class="bar" x="${x}" y="${from}" width="12" height="${Math.max(to - from, 4)}"/>`,
      `<rect fill="url(#${this.#options.id}-stripes)" x="${x}" y="${from}" width="12" height="${Math.max(to - from, 4)}"/>`,
      `<path class="hourglass" d="M${x + 17} ${from + 5}h8l-3 5 3 5h-8l3-5z"/>`,
      `<text x="${x + 30}" y="${from + 4 + this.#look.font * 0.9}">${escape(wrap(label, width, 1)[0] ?? "")}</text>`,
      this.#arrow(release, box, x, to),
      "</g>",
    ].join("");
  }

  #moment({ at, below }: Release): number {
    const box = this.#boxes[at];
    if (!box) return 0;
    return below ? box.bottom - 4 : box.top + box.height / 2;
  }

  #arrow({ by, below }: Release, box: Box, x: number, y: number): string {
    const end = `<path class="end" d="M${x - 2} ${y}h16"/>`;
    if (by === undefined) return end;
    const lane = this.#options.actors.indexOf(by);
    const start = this.#x(lane) + indent + (below ? 6 : 0);
    const right = lane > box.lane;
    // From the box that let it go, or from the other one's bar.
    const begin = right ? start : below ? start + 12 : start + this.#lane - indent - margin;
    const tip = right ? x + 14 : x - 2;
    return `${end}<path class="release" d="M${begin} ${y}H${tip}" marker-end="url(#${this.#options.id}-tip)"/>`;
  }
}

function rowsOf({ rows }: Turn): string {
  const shown = rows.slice(0, 3).map((row) => row.join(", "));
  return shown.join(" | ") + (rows.length > 3 ? ` | … (${rows.length} rows)` : "");
}

/** A picture is shown to others, whom the folders of this machine do not concern. */
function fromHere(place: string): string {
  const path = relative(process.cwd(), place);
  return path.startsWith("..") || isAbsolute(path) ? basename(place) : path.replaceAll("\\", "/");
}

/** Without the folders and the column. */
export const placeOf = (place: string) => basename(place).replace(/(:\d+):\d+$/, "$1");

function tooltip(turn: Turn): string {
  const { n, actor, statement, error, place } = turn;
  return [
    `${n}. ${actor}: ${statement}`,
    ...(turn.rows.length > 0 ? [`→ ${rowsOf(turn)}`] : []),
    ...(error === undefined ? [] : [`✗ ${error}`]),
    ...(place === undefined ? [] : [fromHere(place)]),
  ].join("\n");
}
