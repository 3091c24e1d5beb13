"""All that touches DataJoint's inside: its private members, what differs between its versions, what is changed in it.

Nothing in this folder knows the rest of djjobs, apart from its errors.
"""
