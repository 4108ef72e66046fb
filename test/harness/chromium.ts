/** Debian's Chromium, for what is shown in a browser. */
import { existsSync } from "node:fs";
import { type Browser, chromium } from "playwright-core";
import { type DebianPackage, installMissing } from "./debian.ts";

const PROGRAM = "/usr/bin/chromium";

const chromiumPackage: DebianPackage = { name: "chromium", installed: () => existsSync(PROGRAM) };

/** Why it is not here; undefined: it is. Installs it first, if it may: one test needs it, so it is not installed for all. */
export async function noChromium(): Promise<string | undefined> {
  if (process.env["HOLDFAST_SERVERS"] === undefined) await installMissing([chromiumPackage]);
  return chromiumPackage.installed() ? undefined : `Chromium is not available: there is no ${PROGRAM}`;
}

export const openChromium = (): Promise<Browser> =>
  // It refuses to run as root with its sandbox.
  chromium.launch({ executablePath: PROGRAM, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });

/**
 * Run in a page: texts whose contrast with what is behind them is below what WCAG 2 asks for (AA: 4.5, and 3 for large ones).
 * One of each kind.
 */
export const faintTexts = `(() => {
  const parse = (color) => {
    const [r = 0, g = 0, b = 0, a = 1] = (color.match(/[\\d.]+/g) ?? []).map(Number);
    return { r, g, b, a };
  };
  const over = (top, below) => ({
    r: top.r * top.a + below.r * (1 - top.a),
    g: top.g * top.a + below.g * (1 - top.a),
    b: top.b * top.a + below.b * (1 - top.a),
    a: 1,
  });
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.a > 0) layers.push(color);
      if (color.a === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), { r: 255, g: 255, b: 255, a: 1 });
  };
  const light = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const faint = new Map();
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join("").trim();
    if (text === "" || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest(":disabled, [aria-hidden=true], .header-anchor")) continue;
    const style = getComputedStyle(element);
    const back = behind(element);
    const [a, b] = [light(over(parse(style.color), back)), light(back)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    if (contrast >= (large ? 3 : 4.5)) continue;
    faint.set(style.color + element.className, contrast.toFixed(2) + " " + style.color + " " + text.slice(0, 40));
  }
  return [...faint.values()];
})()`;
