// The views by their names in addresses. Each says how it is titled, what it loads and how that is drawn;
// `every` is after how many seconds it is read anew.

import { h } from "./h.js";
import { to } from "./route.js";
import { overview } from "./views/overview.js";
import { buffer } from "./views/buffer.js";
import { groups } from "./views/groups.js";
import { group } from "./views/group.js";
import { experience } from "./views/experience.js";
import { consumers } from "./views/consumers.js";
import { lease, leases } from "./views/leases.js";
import { step, steps } from "./views/steps.js";
import { departures } from "./views/departures.js";
import { search } from "./views/search.js";

const unknown = {
  title: () => "Nothing here",
  load: async () => ({}),
  render: () => h("section", { class: "card empty" }, h("h1", null, "There is no such view"), h("p", null, h("a", { href: to("overview") }, "To the overview"))),
};

export const VIEWS = { overview, buffer, groups, group, experience, consumers, leases, lease, steps, step, departures, search, unknown };
